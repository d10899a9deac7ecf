"""Fits of scripts/witness.py, which counts how often examples are applied, and what they owe."""

import numpy as np

from tests.cluster.observing import BATCH


def fits(seed, local_rule, split):
    """Kills in the middle of an epoch: one by one, and of all that are left; with split tables."""
    common = {"steps": 500, "momentum": 1.0, "kills": ["one", "one"]}
    everyone = {"kills": ["one", "all"], "momentum": 0.0, "local_rule": local_rule}
    averages = {**common, "seed": seed + 4, "average_every": 2, "momentum": 0.0, "split": True}
    return [
        {**common, "push_every": 1, "fetch_every": 1, "seed": seed, "split": split},
        {**common, "push_every": 4, "fetch_every": 4, "seed": seed + 1, **everyone},
        {**common, "push_every": 3, "fetch_every": 5, "seed": seed + 2, "pipelines": True},
        {**common, "push_every": 1, "fetch_every": 6, "seed": seed + 3, "split": split},
        *([averages] if split else []),
    ]


def assert_each_example_once_an_epoch(fit, got):
    """On every shard, also where a death cut a push off between two of them."""
    handed_out = got["epochs"] * fit["steps"]
    assert got["cut_off"] == 0
    assert [sum(w[0] for w in shard) for shard in got["shards"]] == [handed_out] * len(
        got["shards"]
    )
    averages = "average_every" in fit  # of all but the table that is split
    for name in ("sparse",) if averages else ("sparse", "dense"):
        # How many examples were applied how often:
        assert got["times"][name] == [[got["epochs"], BATCH * fit["steps"]]], got
    if averages:
        return
    assert got["batches"] == handed_out
    if fit["momentum"] and fit["push_every"] == 1:
        n = handed_out
        assert got["every"] == n * (n + 1) // 2  # 1 + 2 + ... + n: a push twice or never shows


def assert_ledger_balances(fit, got):
    for shard in got["shards"]:
        for _, sent, applied, refused in shard:
            assert sent == applied + refused
    first = np.array(got["shards"][0])
    assert first.sum(0).tolist() == [got[k] for k in ("steps", "sent", "applied", "refused")]
    assert got["in_flight"] == 0
    assert got["applied"] == got["staleness_count"]
    if "average_every" in fit:
        assert got["iterations"] == got["steps"] // 3  # of one worker
        return
    assert got["updates"] == got["applied"]
    by_worker = fit.get("local_rule") == "optimizer"  # counts each step of its own
    assert got["iterations"] == (got["steps"] if by_worker else got["updates"])
