"""The table of `server_rules.py`, for `figures.py`, too, which needs no TensorFlow."""

import statistics

import runs

BASELINE = "Adagrad"
BARE = "bare gradient descent"


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Medians; and ratios of an update with the fetch that goes with it."""
    header = ["rule", "update", f"beside {BASELINE}", "of the limit"]
    header += ["fetch", f"both, beside {BASELINE}"]
    rows = []
    for rule, times in results.items():
        base = results[BASELINE]
        updates = [a / b for a, b in zip(times["update"], base["update"], strict=True)]
        limit = [a / b for a, b in zip(results[BARE]["update"], times["update"], strict=True)]
        both = [
            (update + fetch) / (base_update + base_fetch)
            for update, fetch, base_update, base_fetch in zip(
                times["update"], times["fetch"], base["update"], base["fetch"], strict=True
            )
        ]
        rows.append(
            [
                rule,
                f"{statistics.median(times['update']):.0f}",
                runs.spread(updates, 2),
                runs.spread(limit, 2),
                f"{statistics.median(times['fetch']):.0f}",
                runs.spread(both, 2),
            ]
        )
    return runs.table(header, rows)
