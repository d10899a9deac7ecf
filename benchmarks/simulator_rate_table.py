"""The table of `simulator_rate.py`, for `figures.py`, too, which needs no TensorFlow."""

import limits
import runs

FIT, FIT_10 = "fit", "fit, steps_per_execution=10"
STUDY, STUDY_XLA = "study driver", "study driver, XLA"
AIMS = {FIT_10: 1000, STUDY_XLA: 8000}


def table(results: dict[str, list[dict]]) -> str:
    whose = dict.fromkeys([FIT, FIT_10, STUDY, STUDY_XLA], limits.ONE)
    roles = runs.cpu_roles(results)
    rows = [
        [
            name,
            runs.spread([outcome["steps_per_second"] for outcome in outcomes], 0),
            f"at least {AIMS[name]}" if name in AIMS else "",
            *limits.cells(results, name, whose)[:1],
            *runs.cpu_cells(outcomes, roles),
        ]
        for name, outcomes in results.items()
    ]
    header = ["", "updates/s", "aim", f"of the limit: {limits.ONE}", *runs.cpu_header(roles)]
    return runs.table(header, rows)
