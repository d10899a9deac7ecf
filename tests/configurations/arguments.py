"""Rules of the arguments of strategies, optimizers, callbacks and studies."""

import functools
import math
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import tf_dsgd
from tests.configurations import rule
from tests.configurations.rule import Rule
from tf_dsgd.algorithm import Algorithm
from tf_dsgd.algorithms.downpour import AccrueGradient, CompiledOptimizer, Periods
from tf_dsgd.simulation.study import timetable

LOCAL = tf_dsgd.LocalCluster(1)
INTEGER = "must be an integer of at least {}"
NUMBER = "must be a finite number of at least 0"


def one(made, *positional, **fixed):
    """Applies a value as one argument: `one(DownpourStrategy, LOCAL)("push_every")`."""

    def naming(name):
        return lambda value: made(*positional, **fixed, **{name: value})

    return naming


downpour = one(tf_dsgd.DownpourStrategy, LOCAL)
softsync = one(tf_dsgd.SoftsyncStrategy, LOCAL)
elastic = one(tf_dsgd.ElasticAveragingStrategy, LOCAL)
sandblaster = one(tf_dsgd.SandblasterStrategy, LOCAL)
averaging = one(tf_dsgd.PeriodicAveragingStrategy, LOCAL)
callback = one(tf_dsgd.callbacks.PeriodicAveraging)
monitor = one(tf_dsgd.callbacks.StalenessMonitor)
backup = one(tf_dsgd.callbacks.BackupAndRestore, "backups")


def integer(owner, apply, name, least, none=False, **more):
    end = ", or None" if none else ""
    return Rule(
        f"{name} of {owner} is an integer of at least {least}{end}",
        apply(name),
        rule.not_integers(least, none=none),
        rule.integers(least) + [None] * none,
        (name, INTEGER.format(least), "Received: "),
        **more,
    )


def period_of(made):
    return lambda given: made("average_every")(lambda step: given)


def scaling(factor):
    return downpour("staleness_scaling")(lambda tau: tf.fill([], tf.cast(factor, tf.float32)))


def cluster(value):
    return tf_dsgd.DownpourStrategy(value)


def softly(value):
    return tf_dsgd.SoftsyncStrategy(LOCAL, gradients_per_update=2, max_staleness=value)


WRONG_FACTORS = st.floats(max_value=-(2.0**-10), width=32) | st.just(math.nan) | st.just(math.inf)
DELAY_TOLERANT = [
    tf_dsgd.optimizers.FASGD,
    tf_dsgd.optimizers.AdaptiveRevision,
    tf_dsgd.optimizers.DelayCompensatedSGD,
]
KNOWN = ["push_every", "fetch_every", "local_rule", "max_staleness", "wire_dtype"]

STRATEGIES = [
    integer("Downpour", downpour, "push_every", 1),
    integer("Downpour", downpour, "fetch_every", 1),
    integer("Downpour", downpour, "warm_start_steps", 0),
    integer("Downpour", downpour, "max_staleness", 0, none=True),
    integer("softsync", softsync, "gradients_per_update", 1),
    integer("softsync", lambda name: softly, "max_staleness", 0, none=True),
    Rule(
        'staleness_scaling of softsync is "inverse", a function or None',
        one(tf_dsgd.SoftsyncStrategy, LOCAL, gradients_per_update=2)("staleness_scaling"),
        rule.not_words("inverse", none=True).filter(lambda value: not callable(value)),
        ["inverse", None],
        ("staleness_scaling must be", '"inverse"', "callable"),
    ),
    integer("elastic averaging", elastic, "average_every", 1),
    integer("ModelParallel", one(tf_dsgd.ModelParallel, {"a": 0}), "microbatches", 1),
    Rule(
        "a part is an integer of at least 0",
        lambda value: tf_dsgd.ModelParallel({"a/.*": value}),
        rule.not_integers(0),
        [0, 1, np.int64(3)],
        ("parts must map patterns to integers of at least 0", "Received: "),
    ),
    Rule(
        "model_parallel is a ModelParallel or None",
        downpour("model_parallel"),
        rule.NOT_NUMBERS | rule.SEQUENCES | st.just({"a": 0}),
        [tf_dsgd.ModelParallel({"a": 0}), None],
        ("model_parallel must be a tf_dsgd.ModelParallel",),
        error=TypeError,
    ),
    Rule(
        "average_every is an integer of at least 1, or a function",
        averaging("average_every"),
        rule.not_integers(1).filter(lambda value: not isinstance(value, type)),
        [*rule.integers(1), lambda step: 1 if step < 500 else 16],
        ("average_every", INTEGER.format(1)),
    ),
    Rule(
        "a period that is a function gives integers of at least 1",
        period_of(averaging),
        rule.not_integers(1),
        rule.integers(1),
        ("average_every must give a number of mini-batches of at least 1", "for step 0"),
    ),
    Rule(
        "a period that is a function takes the number of steps",
        averaging("average_every"),
        st.sampled_from([object, dict, list, len, math.gcd, print, complex])
        | st.integers(0, 9).map(lambda n: lambda: n)
        | st.integers(0, 9).map(lambda n: lambda step, other: n),
        [lambda step: 4, lambda *steps: 4, functools.partial(max, 3)],
        ("average_every must",),
        shown=lambda value: "Received: ",
    ),
    integer("Sandblaster", sandblaster, "history", 0),
    integer("Sandblaster", sandblaster, "max_evaluations", 1),
    Rule(
        "method is one of five words",
        sandblaster("method"),
        rule.not_words("lbfgs", "cg-fr", "cg-pr", "cg-hs", "gd"),
        ["lbfgs", "cg-fr", "cg-pr", "cg-hs", "gd"],
        ("method must be", '"cg-pr"'),
    ),
    Rule(
        "line_search is one of two words",
        sandblaster("line_search"),
        rule.not_words("wolfe", "armijo"),
        ["wolfe", "armijo"],
        ("line_search must be", '"armijo"'),
    ),
    *(
        Rule(
            f"{name} is a number of at least 0",
            sandblaster(name),
            rule.not_reals(rule.below(0, math.inf)),
            rule.reals(0.5, 1e-9),
            (f"{name} must be a number of at least 0",),
        )
        for name in ("gradient_tolerance", "loss_tolerance")
    ),
    Rule(
        "elasticity is a number above 0 and below 1, or None",
        elastic("elasticity"),
        rule.not_reals(rule.between(0, 1), none=True),
        [*rule.reals(0.5, 0.125), None],
        ("elasticity must be a number above 0 and below 1",),
    ),
    Rule(
        "local_rule is one of three words or a LocalSGD",
        downpour("local_rule"),
        rule.not_words("sgd", "none", "optimizer"),
        ["sgd", "none", "optimizer", tf_dsgd.LocalSGD(0.1)],
        ("local_rule must be", '"optimizer"', "LocalSGD"),
    ),
    Rule(
        "the rate of LocalSGD is a number of at least 0 and below 1e9",
        tf_dsgd.LocalSGD,
        rule.not_reals(rule.below(0, 1e9)),
        rule.reals(0.5, 0, 3),
        ("learning_rate must be a number of at least 0",),
    ),
    Rule(
        'staleness_scaling is "inverse", a function or None',
        downpour("staleness_scaling"),
        rule.not_words("inverse", none=True).filter(lambda value: not callable(value)),
        ["inverse", None],
        ("staleness_scaling must be", '"inverse"', "callable"),
    ),
    Rule(
        "staleness_scaling gives finite factors of at least 0",
        scaling,
        WRONG_FACTORS,
        [0.5, 0.0, 3.0],
        ("staleness_scaling must give a finite factor of at least 0",),
        shown=lambda value: f"gives {float(np.float32(value))} at 0",
        opens_devices=True,
    ),
    Rule(
        "wire_dtype is one of two types of 16 bits, or None",
        downpour("wire_dtype"),
        rule.not_words("bfloat16", "float16", none=True) | st.sampled_from(["float32", "half"]),
        ["bfloat16", "float16", None],
        ("wire_dtype must be", '"bfloat16"', '"float16"', "None"),
    ),
    Rule(
        "sparse is one of two words",
        downpour("sparse"),
        rule.not_words("dense", "lazy"),
        ["dense", "lazy"],
        ("sparse must be", '"dense"', '"lazy"'),
    ),
    Rule(
        "optimizer_state is one of three words",
        averaging("optimizer_state"),
        rule.not_words("average", "local", "reset"),
        ["average", "local", "reset"],
        ("optimizer_state must be", '"average"', '"local"', '"reset"'),
    ),
    Rule(
        "outer_optimizer is a Keras optimizer or None",
        averaging("outer_optimizer"),
        rule.NOT_NUMBERS | st.sampled_from(["sgd", keras.optimizers.SGD, 0.7]),
        lambda: [None, keras.optimizers.SGD(0.7)],
        ("outer_optimizer must be a Keras optimizer",),
        error=TypeError,
    ),
    Rule(
        "outer_optimizer has no use for delays and loss scales",
        lambda made: averaging("outer_optimizer")(made()),
        st.sampled_from(DELAY_TOLERANT)
        | st.just(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        [keras.optimizers.SGD, tf_dsgd.optimizers.BlockMomentum],
        ("outer_optimizer", "no delay and no loss scale", "BlockMomentum"),
        shown=lambda made: f"Received: {type(made()).__name__}",
        opens_devices=True,
        few=True,
    ),
    Rule(
        "cluster is a cluster, a resolver, a ClusterSpec or None",
        cluster,
        rule.NOT_NUMBERS | rule.SEQUENCES | st.sampled_from([tf_dsgd.LocalCluster, "h:2222"]),
        [LOCAL, tf_dsgd.SimulatedCluster(2)],
        ("cluster must be a tf_dsgd.LocalCluster", "ClusterSpec"),
        error=TypeError,
    ),
    Rule(
        "an argument is spelt as documented",
        lambda name: downpour(name)(2 if name.endswith(("every", "staleness")) else None),
        st.sampled_from(KNOWN).map(lambda name: name[:-2] + name[-1])
        | st.sampled_from(["average_every", "num_workers", "tau", "n_push", "pushEvery"]),
        ["push_every", "fetch_every", "max_staleness", "wire_dtype"],
        (),
        error=TypeError,
    ),
]

fasgd = tf_dsgd.optimizers.FASGD
revision = tf_dsgd.optimizers.AdaptiveRevision
compensated = tf_dsgd.optimizers.DelayCompensatedSGD
block = tf_dsgd.optimizers.BlockMomentum
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)


def number(made, name, inside, right, words, none=False):
    return Rule(
        f"{name} of {made.__name__} is a number, {words}",
        one(made)(name),
        rule.not_reals(inside, none=none),
        right + [None] * none,
        (f"{name} must be a finite number", words),
    )


finite = rule.below(0, math.inf)
positive = rule.between(0, math.inf)
share = rule.below(0, 1)
OPTIMIZERS = [
    number(revision, "learning_rate", finite, [*rule.reals(0.5, 0), SCHEDULE], "of at least 0"),
    number(revision, "initial_accumulator_value", positive, rule.reals(0.5, 1), "above 0"),
    number(compensated, "learning_rate", finite, [*rule.reals(0.5, 0), SCHEDULE], "of at least 0"),
    number(compensated, "lam", finite, rule.reals(0.5, 0), "of at least 0"),
    number(compensated, "mean_square_decay", share, rule.reals(0.5, 0), "of at least 0", none=True),
    number(compensated, "epsilon", positive, rule.reals(0.5, 1), "above 0"),
    number(fasgd, "learning_rate", finite, [*rule.reals(0.5, 0), SCHEDULE], "of at least 0"),
    number(fasgd, "epsilon", positive, rule.reals(0.5, 1), "above 0"),
    number(fasgd, "gamma", share, rule.reals(0.5, 0), "of at least 0 and less than 1"),
    number(fasgd, "beta", share, rule.reals(0.5, 0), "of at least 0 and less than 1"),
    number(fasgd, "initial_deviation", finite, rule.reals(0.5, 0), "of at least 0"),
    number(block, "momentum", share, rule.reals(0.5, 0), "less than 1", none=True),
    number(block, "block_learning_rate", positive, [*rule.reals(0.5, 1), SCHEDULE], "above 0"),
    Rule(
        "nesterov is true or false",
        one(block)("nesterov"),
        rule.not_bools(),
        [True, False, np.True_],
        ("nesterov must be True or False",),
    ),
]


def seconds(owner, made, name):
    return Rule(
        f"{name} of {owner} is a positive, finite number of seconds, below 1e9",
        made(name),
        rule.not_reals(rule.between(0, 1e9)),
        rule.SECONDS,
        (f"{name} must be a number of seconds above 0 and below 1e+09",),
    )


NOT_PATHS = (rule.NOT_NUMBERS | rule.SEQUENCES | rule.FLOATS).filter(
    lambda value: not isinstance(value, str)
)
FILES = st.sampled_from([__file__, rule.__file__, tf_dsgd.__file__]) | st.just("")
FOLDERS = ["runs/today", tempfile.gettempdir(), "."]

CALLBACKS = [
    Rule(
        "average_every of the callback is an integer of at least 1, or a function",
        callback("average_every"),
        rule.not_integers(1).filter(lambda value: not isinstance(value, type)),
        [*rule.integers(1), lambda step: 1 if step < 500 else 16],
        ("average_every", INTEGER.format(1), "callable"),
    ),
    Rule(
        "a period of the callback that is a function gives integers of at least 1",
        period_of(callback),
        rule.not_integers(1),
        rule.integers(1),
        ("average_every must give a number of mini-batches of at least 1", "for step 0"),
    ),
    Rule(
        "optimizer_state of the callback is one of three words",
        callback("optimizer_state"),
        rule.not_words("average", "local", "reset"),
        ["average", "local", "reset"],
        ("optimizer_state must be", '"average"', '"local"', '"reset"'),
    ),
    seconds("PeriodicAveraging", callback, "timeout_seconds"),
    seconds("StalenessMonitor", monitor, "every_seconds"),
    Rule(
        "run_dir is a path or None",
        monitor("run_dir"),
        NOT_PATHS,
        [*FOLDERS, None],
        ("run_dir must be the path of a folder",),
        error=TypeError,
    ),
    Rule(
        "run_dir is no file, and not empty",
        monitor("run_dir"),
        FILES,
        FOLDERS,
        ("run_dir must be", "folder"),
        few=True,
    ),
    Rule(
        "tensorboard is true, false or None",
        monitor("tensorboard"),
        rule.not_bools(none=True),
        [False, np.False_, None],
        ("tensorboard must be True, False or None",),
    ),
    Rule(
        "backup_dir is a path",
        tf_dsgd.callbacks.BackupAndRestore,
        NOT_PATHS | st.none(),
        FOLDERS,
        ("backup_dir must be the path of a folder",),
        error=TypeError,
    ),
    Rule(
        "backup_dir is no file, and not empty",
        tf_dsgd.callbacks.BackupAndRestore,
        FILES,
        FOLDERS,
        ("backup_dir must be", "folder"),
        few=True,
    ),
    Rule(
        'save_freq is an integer of at least 1, or "epoch"',
        backup("save_freq"),
        rule.not_integers(1),
        [*rule.integers(1), "epoch"],
        ("save_freq", INTEGER.format(1), '"epoch"'),
    ),
    Rule(
        "double_checkpoint is true or false",
        backup("double_checkpoint"),
        rule.not_bools(),
        [True, False, np.True_],
        ("double_checkpoint must be True or False",),
    ),
    Rule(
        "delete_checkpoint is true or false",
        backup("delete_checkpoint"),
        rule.not_bools(),
        [True, False, np.True_],
        ("delete_checkpoint must be True or False",),
    ),
]

RULE = Algorithm(AccrueGradient(rate=None), Periods(), CompiledOptimizer(None))
WEIGHTS = [np.zeros(2)]
EVENTS = [(0, "fetch"), (0, "push", [[1.0, 2.0]])]


def simulate(value=RULE, optimizer="sgd", weights=WEIGHTS, events=EVENTS, **more):
    return tf_dsgd.simulate(value, optimizer, weights, events, **more)


def memory(name):
    """`configure_memory` on a machine without GPUs, as if it had not been called."""

    def apply(value):
        with (
            mock.patch.object(tf_dsgd.gpu, "_configured", False),
            mock.patch.object(tf.config, "list_physical_devices", return_value=[]),
        ):
            tf_dsgd.gpu.configure_memory(**{name: value})

    return apply


STUDIES = [
    Rule(
        "a rule to simulate is an Algorithm, or a strategy that has one",
        simulate,
        rule.NOT_NUMBERS | st.sampled_from(["downpour", tf_dsgd.DownpourStrategy, Periods()]),
        [RULE],
        ("rule must be a tf_dsgd.algorithm.Algorithm",),
        error=TypeError,
    ),
    Rule(
        "optimizer of simulate is a Keras optimizer or its name",
        lambda value: simulate(optimizer=value),
        rule.NOT_NUMBERS.filter(lambda value: value != "sgd") | st.none() | rule.FLOATS,
        lambda: ["sgd", keras.optimizers.SGD(0.1)],
        ("optimizer must be a Keras optimizer",),
    ),
    Rule(
        "weights of simulate are a list of arrays",
        lambda value: simulate(weights=value, events=[]),
        rule.FLOATS | rule.WORDS | st.none() | st.binary() | st.sampled_from([np.array(2.0), int]),
        [[np.zeros(2)], (np.zeros(2),)],
        ("weights must be a list of arrays",),
    ),
    Rule(
        "events of simulate are a list",
        lambda value: simulate(events=value),
        rule.FLOATS | rule.WORDS | st.none() | st.binary() | st.sampled_from([np.array(2.0), int]),
        lambda: [EVENTS, tuple(EVENTS), iter(EVENTS)],
        ("events must be a list of events",),
    ),
    Rule(
        "a gradient of simulate has its weight's shape",
        lambda value: simulate(events=[(0, "fetch"), (0, "push", [value])]),
        st.lists(st.floats(-9, 9), max_size=4).filter(lambda value: len(value) != 2)
        | st.floats(-9, 9),
        [[1.0, 2.0], np.ones(2), [np.float16(1), 3]],
        ("events[1], gradient 0 must have its weight's shape (2,)",),
    ),
    Rule(
        "a gradient of simulate is numbers",
        lambda value: simulate(events=[(0, "fetch"), (0, "push", [value])]),
        st.lists(rule.WORDS | st.none(), min_size=2, max_size=2) | rule.WORDS | st.none(),
        [[1.0, 2.0], np.ones(2, np.int32)],
        ("events[1], gradient 0 must be an array of numbers",),
    ),
    integer("simulate", lambda name: lambda v: simulate(num_workers=v), "num_workers", 1, True),
    integer(
        "timetable",
        lambda name: lambda v: timetable(tf_dsgd.SimulatedCluster(2), Periods(), v),
        "num_batches",
        1,
    ),
    Rule(
        "limit_mb is an integer of at least 1, or None",
        memory("limit_mb"),
        rule.not_integers(1, none=True),
        [*rule.integers(1), None],
        ("limit_mb", INTEGER.format(1), "None for no limit"),
    ),
    Rule(
        "growth is true or false",
        memory("growth"),
        rule.not_bools(),
        [True, False, np.False_],
        ("growth must be True or False",),
    ),
]

RULES = [*STRATEGIES, *OPTIMIZERS, *CALLBACKS, *STUDIES]
