"""Rules of local and simulated clusters: their delays, schedules and faults."""

import math

import numpy as np
from hypothesis import strategies as st

import tf_dsgd
from tests.configurations import rule
from tests.configurations.rule import Rule
from tf_dsgd.simulation.faults import fail_at, fail_ps_at, stop_at

PART = st.integers(0, 9)


def simulated(**options):
    return tf_dsgd.SimulatedCluster(**{"num_workers": 2, **options})


def argument(name):
    return lambda value: simulated(**{name: value})


def count(owner, apply, name, most, none=False):
    return Rule(
        f"{name} of {owner} is an integer from 1 to {most:,}",
        apply,
        rule.not_integers(1, below=most + 1, none=none),
        [*rule.integers(1), most] + [None] * none,
        (f"{name} must be",),
    )


def times(name):
    return [
        Rule(
            f"{name} is a number of at least 0 and below 1e9, a delay, or a list of these",
            argument(name),
            rule.not_reals(rule.below(0, 1e9), sequences=True).filter(
                lambda value: not isinstance(value, bytes) or not value
            ),
            [*rule.reals(0.5, 0), tf_dsgd.Pareto(1.0), [1, tf_dsgd.LogNormal(1.0)], np.ones(2)],
            (f"{name} must be a number of virtual seconds of at least 0", "tf_dsgd.Exponential"),
        ),
        Rule(
            f"{name} has one entry per worker",
            argument(name),
            st.lists(st.floats(0, 9), max_size=5).filter(lambda value: len(value) != 2),
            [[1.0, 2.0], (1, 2)],
            (f"{name} has one entry per worker or is one number", "for 2 workers"),
            lambda value: f"{len(value)} entries",
        ),
        Rule(
            f"an entry of {name} is a number of at least 0 and below 1e9, or a delay",
            lambda value: simulated(**{name: [1.0, value]}),
            rule.not_reals(rule.below(0, 1e9)),
            [*rule.reals(0.5, 0), tf_dsgd.Exponential(1.0)],
            (f"{name}[1] must be a number of virtual seconds of at least 0",),
        ),
    ]


CLUSTERS = [
    count("LocalCluster", tf_dsgd.LocalCluster, "num_workers", 1024, none=True),
    count("SimulatedCluster", argument("num_workers"), "num_workers", 100_000),
    count("SimulatedCluster", argument("num_shards"), "num_shards", 10_000),
    count("SimulatedCluster", argument("devices_per_worker"), "devices_per_worker", 64),
    count(
        "LocalCluster",
        lambda value: tf_dsgd.LocalCluster(1, devices_per_worker=value),
        "devices_per_worker",
        64,
    ),
    *times("compute_seconds"),
    *times("network_seconds"),
    Rule(
        "network_bytes_per_second is a positive, finite number, or None",
        argument("network_bytes_per_second"),
        rule.not_reals(rule.between(0, math.inf)).filter(lambda value: value is not None),
        [0.5, 12.5e6, None],
        ("network_bytes_per_second must be a finite number above 0", "or None"),
    ),
    Rule(
        "seed is an integer of at least 0",
        argument("seed"),
        rule.not_integers(0, below=1 << 128),
        [*rule.integers(0), 2**64],
        ("seed must be an integer of at least 0",),
    ),
    Rule(
        "worker_timeout_seconds is a positive, finite number of seconds, below 1e9",
        argument("worker_timeout_seconds"),
        rule.not_reals(rule.between(0, 1e9)),
        rule.SECONDS,
        ("worker_timeout_seconds must be a number of seconds above 0 and below 1e+09",),
    ),
    Rule(
        "late_after_seconds is a positive, finite number of seconds, below 1e9, or None",
        argument("late_after_seconds"),
        rule.not_reals(rule.between(0, 1e9)).filter(lambda value: value is not None),
        [*rule.SECONDS, None],
        ("late_after_seconds must be a number of seconds above 0 and below 1e+09",),
    ),
]


def delay(made, name, inside, right, words, **fixed):
    return Rule(
        f"{name} of {made.__name__} is {words}",
        lambda value: made(**{**fixed, name: value}),
        rule.not_reals(inside),
        right,
        (f"{name} must be",),
    )


MEAN = rule.below(0, 1e9), rule.reals(0.5, 0), "a number of at least 0 and below 1e9"
DELAYS = [
    delay(tf_dsgd.Exponential, "mean_seconds", *MEAN),
    delay(tf_dsgd.LogNormal, "mean_seconds", *MEAN),
    delay(
        tf_dsgd.LogNormal,
        "sigma",
        rule.within(0, 10),
        rule.reals(0.5, 0, 10),
        "a number from 0 to 10",
        mean_seconds=1.0,
    ),
    delay(tf_dsgd.Pareto, "mean_seconds", *MEAN),
    delay(
        tf_dsgd.Pareto,
        "shape",
        lambda value: 1 < value <= 1000,
        rule.reals(1.5, 2, 1000),
        "a number above 1 and at most 1000",
        mean_seconds=1.0,
    ),
    delay(tf_dsgd.Straggler, "seconds", *MEAN, factor=2),
    delay(
        tf_dsgd.Straggler,
        "factor",
        rule.within(0, 1e6),
        rule.reals(0.5, 0, 1e6),
        "a number from 0 to a million",
        seconds=1.0,
    ),
    delay(
        tf_dsgd.Straggler,
        "slow_from",
        rule.within(0, 1e12),
        rule.reals(0.5, 0),
        "a number from 0 to 1e12",
        seconds=1.0,
        factor=2,
    ),
    delay(
        tf_dsgd.Straggler,
        "slow_until",
        lambda value: 3 < value <= 1e12 or value == math.inf,
        [*rule.reals(3.5, 9), math.inf, np.float32(math.inf)],
        "a number above slow_from, or infinity",
        seconds=1.0,
        factor=2,
        slow_from=3.0,
    ),
]


def played(*entries):
    return simulated(schedule=entries)


NOT_LISTS = st.one_of(
    rule.FLOATS,
    st.integers(),
    st.booleans(),
    rule.WORDS,
    st.binary(),
    st.sampled_from([np.array(2), np.array(2.5), int, object, len]),
)
NOT_ENTRIES = st.one_of(
    rule.NOT_NUMBERS,
    rule.FLOATS,
    rule.SEQUENCES,
    st.none(),
    st.tuples(st.integers(0, 1), rule.WORDS | st.none() | st.integers()),
    st.sampled_from([(0,), (0, "fetch", 1, 2), [0, "Push"], ("fetch", 0), (0, "stop")]),
)
SCHEDULES = [
    Rule(
        "a schedule is a sequence of entries",
        argument("schedule"),
        NOT_LISTS,
        [[], [(0, "fetch")], ((0, "fetch"), [0, "push"])],
        ("schedule must be a sequence of entries",),
    ),
    Rule(
        "an entry of a schedule is (worker, action) or (worker, action, what)",
        lambda entry: played((0, "fetch"), entry),
        NOT_ENTRIES,
        [(0, "push"), [1, "fetch"], (0, "push", (3, 4)), (np.int64(1), "flush")],
        ("schedule[1] must be (worker, action) or (worker, action, what)", "'flush'"),
    ),
    Rule(
        "the worker of a schedule's entry is there",
        lambda worker: played((0, "fetch"), (worker, "fetch")),
        rule.not_integers(0, below=2),
        [0, 1, np.int64(1), np.uint8(0)],
        ("schedule[1]",),
    ),
    Rule(
        "a schedule names mini-batches by a sequence",
        lambda what: played((0, "fetch"), (0, "push", what)),
        rule.FLOATS | st.integers() | st.booleans() | rule.WORDS | st.binary() | st.sets(PART),
        [(), [0], (3, 4), range(2), None],
        ("schedule[1] must name its mini-batches by a sequence of numbers, () for none",),
    ),
    Rule(
        "a schedule names mini-batches by integers of at least 0",
        lambda batch: played((0, "fetch"), (0, "push", [batch])),
        rule.not_integers(0),
        rule.integers(0),
        ("schedule[1] has", "where an integer of at least 0, below 2**31, is expected"),
    ),
    Rule(
        "a schedule names a version by an integer of at least 0",
        lambda version: played((0, "fetch", version)),
        rule.not_integers(0, none=True),
        [*rule.integers(0), None],
        ("schedule[0] has", "where an integer of at least 0, below 2**31, is expected"),
    ),
    Rule(
        "a schedule uses a mini-batch once",
        lambda batches: played(*[(m % 2, "push", [b]) for m, b in enumerate(batches)]),
        st.lists(PART, min_size=2, max_size=6).filter(lambda b: len({*b}) < len(b)),
        [[0, 1, 2], [7, 3]],
        ("each is used once", "as schedule["),
        lambda batches: "uses mini-batch ",
    ),
    Rule(
        "a schedule takes the place of delays and their seed",
        lambda options: simulated(schedule=[], **options),
        st.dictionaries(
            st.sampled_from(["compute_seconds", "network_seconds"]),
            st.floats(0.5, 9).filter(lambda value: value != 1),
            min_size=1,
        )
        | st.builds(dict, seed=st.integers(1, 99)),
        [{}, {"compute_seconds": 1, "seed": np.int64(0)}, {"network_seconds": [0.0, 0]}],
        ("A schedule takes the place of compute_seconds, network_seconds and seed: leave",),
        lambda options: "{}={!r}".format(*next(iter(sorted(options.items())))),
    ),
]

FAULTS = [
    Rule(
        "faults are a list",
        argument("faults"),
        NOT_LISTS | st.builds(fail_at, PART, PART),
        [[], (), None, [fail_at(0, 1)], (fail_at(0, 1), fail_ps_at(0, 3))],
        ("faults must be a list of tf_dsgd.faults",),
    ),
    Rule(
        "a fault is made by a function of tf_dsgd.faults",
        lambda fault: simulated(faults=[fail_at(0, 1), fault]),
        NOT_ENTRIES | st.sampled_from([fail_at, tf_dsgd.faults.Fault]),
        [stop_at(1, 2, seconds=3.0)],
        ("faults[1] must be made by tf_dsgd.faults.fail_at, stop_at or fail_ps_at",),
    ),
    Rule(
        "the worker of a fault is there",
        lambda worker: simulated(faults=[fail_at(worker, 1)]),
        st.integers(2, 2**31 - 1),
        [0, np.int64(1)],
        ("faults[0] is of worker", "there are 2, from 0"),
    ),
    Rule(
        "the ps of a fault is there",
        lambda ps: simulated(num_shards=3, faults=[fail_ps_at(ps, 1)]),
        st.integers(3, 2**31 - 1),
        [0, np.int64(2)],
        ("faults[0] is of ps", "there are 3, from 0"),
    ),
    Rule(
        "faults are not put into a schedule",
        lambda faults: simulated(faults=faults, schedule=[]),
        st.lists(st.builds(fail_at, st.integers(0, 1), PART), min_size=1, max_size=3),
        [[], None],
        ("faults cannot be put into a schedule", "leave one of the two out"),
        lambda faults: "",
    ),
    Rule(
        "worker of a fault is an integer of at least 0",
        lambda worker: fail_at(worker, 1),
        rule.not_integers(0),
        rule.integers(0),
        ("worker must be an integer of at least 0",),
    ),
    Rule(
        "step of a fault is an integer of at least 0",
        lambda step: stop_at(0, step, seconds=1.0),
        rule.not_integers(0),
        rule.integers(0),
        ("step must be an integer of at least 0",),
    ),
    Rule(
        "ps of a fault is an integer of at least 0",
        lambda ps: fail_ps_at(ps, 1),
        rule.not_integers(0),
        rule.integers(0),
        ("ps must be an integer of at least 0",),
    ),
    Rule(
        "phase of a fault is a word of four",
        lambda phase: fail_at(0, 1, phase),
        rule.not_words("fetch", "compute", "push", "lock"),
        ["fetch", "compute", "push", "lock"],
        ("phase must be", '"fetch"', '"compute"', '"push"', '"lock"'),
    ),
    Rule(
        "back_after is a positive number, or None",
        lambda seconds: fail_at(0, 1, back_after=seconds),
        rule.not_reals(rule.between(0, math.inf), none=True),
        [*rule.reals(0.5, 60), None],
        ("back_after must be a positive number of virtual seconds",),
    ),
    Rule(
        "seconds of a stop is a positive number",
        lambda seconds: stop_at(0, 1, seconds=seconds),
        rule.not_reals(rule.between(0, math.inf)),
        rule.reals(0.5, 60),
        ("seconds must be a positive number of virtual seconds",),
    ),
]

RULES = [*CLUSTERS, *DELAYS, *SCHEDULES, *FAULTS]
