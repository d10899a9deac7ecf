"""Rules of `compression` and of the arguments of codecs."""

from hypothesis import strategies as st

import tf_dsgd
from tests.configurations import rule
from tests.configurations.rule import Rule
from tf_dsgd import compression

LOCAL = tf_dsgd.LocalCluster(1)
GOOD = [compression.Threshold(0.5), compression.QSGD(4), None]
WRONG = st.one_of(
    rule.NOT_NUMBERS, rule.SEQUENCES, rule.FLOATS, st.sampled_from([compression.Threshold, "topk"])
)


def clip(value):
    return compression.Threshold(0.5, clip=value)


RULES = [
    Rule(
        "compression of Downpour is a codec or None",
        lambda value: tf_dsgd.DownpourStrategy(LOCAL, compression=value),
        WRONG,
        GOOD,
        ("compression must be a codec of tf_dsgd.compression", "Threshold(0.002)", "None"),
        error=TypeError,
    ),
    Rule(
        "compression of softsync is a codec or None",
        lambda value: tf_dsgd.SoftsyncStrategy(LOCAL, gradients_per_update=2, compression=value),
        WRONG,
        GOOD,
        ("compression must be a codec of tf_dsgd.compression", "Threshold(0.002)", "None"),
        error=TypeError,
    ),
    Rule(
        "a codec that keeps something does not go with tables that placement names",
        lambda value: tf_dsgd.DownpourStrategy(
            LOCAL, compression=value, placement={"users/.*": tf_dsgd.Rows()}
        ),
        st.sampled_from([compression.Threshold(0.5), compression.QSGD(4), compression.OneBit()]),
        [compression.Cast("bfloat16"), None],
        ("keeps something of each weight", "'users/.*'", "Cast", "leave one of the two out"),
        few=True,
    ),
    Rule(
        "tau is a number above 0 and finite",
        compression.Threshold,
        rule.not_reals(rule.between(0, float("inf"))),
        rule.reals(0.5, 3),
        ("tau of Threshold must be a number above 0 and finite",),
    ),
    Rule(
        "clip is a finite number of at least tau, or None",
        clip,
        rule.not_reals(rule.below(0.5, float("inf")), none=True),
        [*rule.reals(0.5, 3), None],
        ("clip of Threshold must be a finite number of at least tau, 0.5, or None",),
    ),
    Rule(
        "entropy is true or false",
        lambda value: compression.Threshold(0.5, entropy=value),
        rule.not_bools(),
        [True, False],
        ("entropy of Threshold must be True or False",),
    ),
    Rule(
        "fraction is a number above 0 and at most 1",
        compression.TopK,
        rule.not_reals(lambda value: 0 < value <= 1),
        rule.reals(0.5, 1),
        ("fraction of TopK must be a number above 0 and at most 1",),
    ),
    Rule(
        "momentum of TopK is a number of at least 0 and below 1",
        lambda value: compression.TopK(0.5, momentum=value),
        rule.not_reals(rule.below(0, 1)),
        rule.reals(0.5, 0),
        ("momentum of TopK must be a number of at least 0 and below 1",),
    ),
    Rule(
        "levels is an integer of at least 1, below 32,768",
        compression.QSGD,
        rule.not_integers(1, below=1 << 15),
        rule.integers(1),
        ("levels of QSGD must be an integer of at least 1", "below 32,768"),
    ),
    Rule(
        "seed of QSGD is an integer of at least 0",
        lambda value: compression.QSGD(4, seed=value),
        rule.not_integers(0),
        rule.integers(0),
        ("seed of QSGD must be an integer of at least 0",),
    ),
    Rule(
        "rank is an integer of at least 1",
        compression.PowerSGD,
        rule.not_integers(1),
        rule.integers(1),
        ("rank of PowerSGD must be an integer of at least 1",),
    ),
    Rule(
        "dtype of Cast is one of two types of 16 bits",
        compression.Cast,
        rule.not_words("bfloat16", "float16") | st.sampled_from(["float32", "half", None]),
        ["bfloat16", "float16"],
        ("dtype of Cast must be", '"bfloat16"', '"float16"'),
    ),
]
