"""MirroredStrategy with 1 and with 20 steps a call, until the accuracies of `time_to_accuracy.py`.

    python benchmarks/mirrored_steps.py

That program has it with one step a call, as Keras has by default. This one runs it with both, one
after the other, at the rates and to the targets that are published there, on the same five seeds.
"""

import argparse

import accuracy_tables
import aims
import runs

STEPS = (1, 20)


def measure() -> dict[str, list[dict]]:
    """Both settings of each task: "task, steps" to its runs."""
    results: dict[str, list[dict]] = {}
    for entry in aims.published("time_to_accuracy")["contenders"]:
        if entry["spec"]["kind"] != "mirrored" or not entry["runs"]:
            continue
        same = ("task", "kind", "target", "epochs", "batch_size", "workers")
        spec = {name: entry["spec"][name] for name in same}
        spec |= {"rate": entry["rate"], "seeds": [run["seed"] for run in entry["runs"]]}
        for steps in STEPS:
            found = runs.run_contender(
                "accuracy_contenders.py", {**spec, "steps_per_execution": steps}
            )
            results[f"{spec['task']}, {steps}"] = found["runs"]
            print(f"{spec['task']}, {steps} a call", flush=True)
    return results


def table(results: dict[str, list[dict]]) -> str:
    """Seconds until the target, and their ratios by seed."""
    rows = []
    for task in dict.fromkeys(name.rpartition(", ")[0] for name in results):
        one, several = (results[f"{task}, {steps}"] for steps in STEPS)
        entries = [{"runs": one}, {"runs": several}]
        cells = [accuracy_tables.shown(accuracy_tables.measured(e, "seconds"), 2) for e in entries]
        cells += [accuracy_tables.times(entries[1], [one], m) for m in ("seconds", "cpu_seconds")]
        rows.append([task, *cells])
    header = ["task", "seconds, 1 step a call", "20 steps a call", "times as fast"]
    return runs.table([*header, "times as little CPU"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    record = {**runs.provenance(), "results": measure()}
    runs.write_json(options.json, record)
    print(f"\n{runs.heading(record)}\n\n{table(record['results'])}")


if __name__ == "__main__":
    main()
