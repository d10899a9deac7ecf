"""What a prefetch of rows could gain at most, of tables that are split by rows.

    python benchmarks/prefetch.py --json prefetch.json

Training as it is, each of whose mini-batches waits until its rows are read, beside the same where
reading costs nothing: it gets constants of the same shape and size, and sends and updates the same
rows. A prefetch reads the next mini-batch's rows while this one is computed. So it costs all the
processor time of reading, and saves at most the seconds: it cannot gain more than this bound.

The recommender of recommender_task.py, Adagrad, on two threads (`local`) and on two workers and two
ps processes (`cluster`). The two run in turn, and a ratio is of the two runs of one repetition.
`memory` is the reading alone, in a loop in TensorFlow, of rows in this process's memory.
"""

import argparse
import dataclasses
import time

import recommender
import recommender_task as task
import runs

READ = {
    "local": recommender.THREADS,
    "cluster": recommender.SPLIT,
}


def unread(kind: recommender.Kind) -> recommender.Kind:
    return dataclasses.replace(kind, name=f"{kind.name}, rows for nothing", kind="unread")


def measure(group: str, rows: int, period: int, options) -> dict:
    kinds = {"read": READ[group], "unread": unread(READ[group])}
    results: dict[str, list[dict]] = {name: [] for name in kinds}
    for _ in range(options.repetitions):
        for name, kind in kinds.items():
            spec = recommender.spec_of(kind, "adagrad", rows, period, options)
            command = recommender.command(kind, spec, options)
            results[name].append(runs.run_process(command, recommender.TIMEOUT_SECONDS))
    return {"group": group, "rows": rows, "period": period, **results}


def reading_ms(rows: int, steps: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Processor time of reading a mini-batch's rows of both tables, and of making constants."""
    import tensorflow as tf

    spec = task.Spec(rows=rows, steps=steps)
    x, _ = task.make_data(spec)
    tables = {name: tf.Variable(tf.random.uniform([rows, task.WIDTH])) for name in x}

    def read(name: str, named: tf.Tensor) -> tf.Tensor:
        handle = tables[name].handle
        return tf.raw_ops.ResourceGather(resource=handle, indices=named, dtype=tf.float32)

    def constant(name: str, named: tf.Tensor) -> tf.Tensor:
        return tf.fill([tf.size(named), task.WIDTH], 0.05)

    def loop(of: object) -> object:
        def step(n: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            for name, all_ids in x.items():
                ids = tf.constant(all_ids)[n * task.BATCH : (n + 1) * task.BATCH]
                named, place = tf.unique(ids)
                total += tf.reduce_sum(tf.gather(of(name, named), place)[0])
            return n + 1, total

        def run() -> tf.Tensor:
            return tf.while_loop(lambda n, _: n < steps, step, [0, 0.0], parallel_iterations=1)[1]

        return tf.function(run, autograph=False)

    found: tuple[list[float], list[float]] = [], []
    loops = [loop(read), loop(constant)]
    for repetition in range(repetitions + 1):
        for function, milliseconds in zip(loops, found, strict=True):
            began = time.process_time()
            function().numpy()
            if repetition:  # the first one traces
                milliseconds.append(1e3 * (time.process_time() - began) / steps)
    return found


def cpu_ms(outcomes: list[dict]) -> list[float]:
    """Of all processes, a mini-batch."""
    return [1e3 * sum(o["cpu_seconds"].values()) / o["steps"] for o in outcomes]


def report(results: list[dict]) -> str:
    table = []
    for result in results:
        read, free = result["read"], result["unread"]
        pairs = zip(cpu_ms(free), cpu_ms(read), strict=True)
        table.append(
            [
                result["group"],
                f"{result['rows']:,}",
                str(result["period"]),
                f"{runs.median(read, recommender.SPEED):,.0f}",
                runs.spread(runs.ratios(result, "unread", "read", recommender.SPEED), 2),
                runs.spread(cpu_ms(read), 2),
                runs.spread([nothing / all_of_it for nothing, all_of_it in pairs], 2),
            ]
        )
    heads = ["", "rows", "period", "examples/s", "for nothing: times as fast"]
    return runs.table([*heads, "CPU, ms/mini-batch", "for nothing: times the CPU"], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default="memory,local,cluster")
    parser.add_argument("--rows", default="1e6")
    parser.add_argument("--periods", default="1,20")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    options.live, options.tf_keras_python = 0, None
    results: list[dict] = []
    groups = options.groups.split(",")
    if "memory" in groups:
        for rows in options.rows.split(","):
            spent = reading_ms(int(float(rows)), options.steps, 5)
            read, constants = (runs.spread(milliseconds, 2) for milliseconds in spent)
            print(f"{rows} rows: reading {read} ms of processor time, constants {constants} ms")
    for group in [group for group in groups if group != "memory"]:
        for rows in options.rows.split(","):
            for period in options.periods.split(","):
                results.append(measure(group, int(float(rows)), int(period), options))
                runs.write_json(options.json, {**runs.provenance(), "results": results})
                print(report(results[-1:]), flush=True)
    print(runs.heading(runs.provenance()), report(results), sep="\n\n")


if __name__ == "__main__":
    main()
