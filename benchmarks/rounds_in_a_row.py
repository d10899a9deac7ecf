"""What several rounds in one call save at periods of 1, and what they cost at first.

    python benchmarks/rounds_in_a_row.py --rounds 1,2,4 --repetitions 3

An MLP 20-32-32-32-1 with Adam, two workers and two ps, mini-batches of 4: so small that a call is
most of a mini-batch. Workers are told of several rounds from the first mini-batch on, and not after
a thousand as the package does, so that the first `fit` has what preparing them takes.
"""

import argparse
import json
import sys
import time

import runs

SHORT, LONG = 100, 4000
"""Mini-batches of the first `fit`, and of one after it."""
BATCH = 4
TIMEOUT_SECONDS = 600.0


def contender(rounds: int) -> dict:
    """In the launcher's processes: seconds of a first, a second and a long `fit`."""
    import keras
    import numpy as np

    import tf_dsgd
    from tf_dsgd.engine import in_a_row

    in_a_row.ROUNDS, in_a_row.PAYS_AFTER = rounds, 0
    x = np.random.default_rng(0).normal(size=(LONG * BATCH, 20)).astype("float32")
    strategy = tf_dsgd.DownpourStrategy()
    with strategy.scope():
        hidden = [keras.layers.Dense(32, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((20,)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.001), "mse", steps_per_execution=20)
    seconds = []
    for batches in (SHORT, SHORT, LONG):
        began = time.perf_counter()
        given = x[: batches * BATCH]
        model.fit(given, given[:, :1], batch_size=BATCH, verbose=0)
        seconds.append(time.perf_counter() - began)
    if strategy.steps != 2 * SHORT + LONG:
        raise SystemExit(f"{strategy.steps} mini-batches were counted")
    return {"seconds": seconds}


def main() -> None:
    if sys.argv[1:] and sys.argv[1].isdecimal():
        print(json.dumps(contender(int(sys.argv[1]))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default="1,2,4", help="of a call, with commas")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    rounds = [int(each) for each in options.rounds.split(",")]
    launch = ["-m", "tf_dsgd.launch", "--workers", "2", "--ps", "2", __file__]
    found: dict[int, list[list[float]]] = {each: [] for each in rounds}
    for _ in range(options.repetitions):
        for each in rounds:
            command = [sys.executable, *launch, str(each)]
            found[each].append(runs.run_process(command, TIMEOUT_SECONDS)["seconds"])
    rows = [
        [str(each), *(runs.spread([of[k] for of in of_all], 1) for k in range(3))]
        for each, of_all in found.items()
    ]
    first, second = f"first {SHORT} mini-batches, s", f"{SHORT} more, s"
    print(runs.heading(runs.provenance()) + "\n")
    print(runs.table(["rounds of a call", first, second, f"{LONG:,} more, s"], rows))


if __name__ == "__main__":
    main()
