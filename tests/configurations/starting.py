"""Rules of clusters in Python, of the environment, and of the launcher's command line."""

import contextlib
import io
import json
import socket
from pathlib import Path

import tensorflow as tf
from hypothesis import strategies as st

import tf_dsgd
from tests.configurations import rule
from tests.configurations.rule import Refused, Rule
from tests.configurations.tf_config import (
    CLUSTER,
    GOOD_TEXT,
    HOSTS,
    MANY,
    PORTS,
    WORKERS,
    environment,
    in_quotes,
    nothing,
)
from tf_dsgd import resuming
from tf_dsgd.launch import launcher as launch
from tf_dsgd.launch import server as serve
from tf_dsgd.transport import cluster_spec, listening

SPEC = tf.train.ClusterSpec(CLUSTER)


def spec(jobs):
    return tf_dsgd.TFCluster(tf.train.ClusterSpec(jobs))


def resolver(task):
    made = tf.distribute.cluster_resolver.SimpleClusterResolver
    return cluster_spec.from_resolver(made(SPEC, task_type=task[0], task_id=task[1]))


def without_ps(strategy):
    """Makes a strategy on workers that are not there, for which it does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    jobs = tf.train.ClusterSpec({"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1"]})
    options = {"gradients_per_update": 2} if strategy is tf_dsgd.SoftsyncStrategy else {}
    with contextlib.suppress(TimeoutError):
        strategy(tf_dsgd.TFCluster(jobs, connect_timeout_seconds=0.01), **options)


def listening_to(text):
    with environment(**{listening.EVERYWHERE: text}):
        return spec(CLUSTER)


def in_groups(workers, number, ps=("p:1",)):
    """A cluster with so many worker tasks, or those of these indices."""
    indices = range(workers) if isinstance(workers, int) else workers
    jobs = {"chief": ["c:1"], "worker": {index: f"h{index}:1" for index in indices}}
    made = tf.train.ClusterSpec({**jobs, **({"ps": list(ps)} if ps else {})})
    return tf_dsgd.TFCluster(made, tasks_per_worker=number)


def grouped_by(text):
    with environment(**{resuming.TASKS_PER_WORKER: text}):
        return spec(CLUSTER)


def threads(text):
    with environment(**{launch.THREADS: text}):
        return serve._threads()


def timeout(name, none=False):
    return Rule(
        f"{name} of TFCluster is a positive, finite number of seconds, below 1e9",
        lambda value: tf_dsgd.TFCluster(SPEC, **{name: value}),
        rule.not_reals(rule.between(0, 1e9)).filter(lambda value: not none or value is not None),
        [*rule.SECONDS, *([None] if none else [])],
        (f"{name} must be a number of seconds above 0 and below 1e+09",),
    )


PRINTED = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
IN_PYTHON = [
    Rule(
        "a ClusterSpec has workers, and a chief or ps tasks",
        spec,
        st.tuples(st.sampled_from(["worker", "ps", "chief"]), MANY).map(
            lambda both: {both[0]: both[1][: None if both[0] != "chief" else 1]}
        ),
        [CLUSTER, {"worker": WORKERS, "ps": ["h3:1"]}, {"worker": {3: "h:1"}, "ps": ["h3:1"]}],
        ("the ClusterSpec has", 'Add "'),
        nothing,
    ),
    Rule(
        "an address in a ClusterSpec has a host and a port",
        lambda address: spec({**CLUSTER, "worker": [address]}),
        HOSTS | PORTS.map(lambda port: f":{port}") | HOSTS.map(lambda host: f"grpc://{host}:1"),
        ["h1:1", "[fd00::1]:1"],
        ('the ClusterSpec["worker"][0] is', 'Write "host:port"'),
        in_quotes,
    ),
    Rule(
        "resolver is a ClusterResolver, a ClusterSpec or None",
        tf_dsgd.TFCluster,
        rule.NOT_NUMBERS
        | st.sampled_from([CLUSTER, GOOD_TEXT, "grpc://h:1", tf.train.ClusterSpec]),
        [SPEC],
        ("resolver must be a ClusterResolver, a tf.train.ClusterSpec", "TF_CONFIG"),
        error=TypeError,
    ),
    Rule(
        "a resolver's task is one of its cluster",
        resolver,
        st.tuples(st.sampled_from(["worker", "ps", "chief"]), st.integers(2, 99)),
        [("worker", 1), ("ps", 0), ("chief", 0)],
        ("SimpleClusterResolver has the index", "Correct the index"),
        lambda task: f"index {task[1]}",
    ),
    timeout("connect_timeout_seconds"),
    timeout("worker_timeout_seconds"),
    timeout("late_after_seconds", none=True),
    Rule(
        "tasks_per_worker is an integer from 1 to 64",
        lambda number: tf_dsgd.TFCluster(SPEC, tasks_per_worker=number),
        rule.not_integers(1, 65, none=True),
        [1, 2, None],
        ("tasks_per_worker must be an integer of at least 1, below 65",),
    ),
    Rule(
        "worker tasks are so many groups of tasks_per_worker",
        lambda both: in_groups(*both),
        st.tuples(st.integers(1, 40), st.integers(2, 64)).filter(lambda both: both[0] % both[1]),
        [(4, 2), (3, 1), (6, 3), (64, 64)],
        ("makes groups of as many worker tasks", "Start a multiple of"),
        lambda both: f"tasks_per_worker={both[1]} ",
    ),
    Rule(
        "of a group of tasks all are named",
        lambda indices: in_groups(dict.fromkeys(indices), 2),
        st.sampled_from([[0, 2], [1, 2], [0, 1, 3, 4], [1, 3], [2, 4]]),
        [[0, 1], [2, 3], [0, 1, 4, 5]],
        ("makes a group of worker tasks in a row", "Name all tasks of each group, or none"),
        nothing,
        few=True,
    ),
    Rule(
        "groups of tasks need ps tasks",
        lambda number: in_groups(number, number, ps=()),
        st.integers(2, 64),
        [1],
        ("needs ps tasks", "Leave tasks_per_worker out; or add ps tasks, if"),
        lambda number: f"tasks_per_worker={number} ",
    ),
    Rule(
        "TF_DSGD_TASKS_PER_WORKER is an integer from 1 to 64",
        grouped_by,
        PRINTED.filter(lambda text: not text.isdigit()) | st.integers(65, 9999).map(str),
        ["1", "2", "", " "],
        ("TF_DSGD_TASKS_PER_WORKER must be an integer of at least 1, below 65",),
        lambda text: text if text.isdigit() else repr(text),
    ),
    Rule(
        "TF_DSGD_LISTEN is one word",
        listening_to,
        PRINTED.filter(lambda text: text != "everywhere") | st.sampled_from(["Everywhere", "all"]),
        ["everywhere", ""],
        ('TF_DSGD_LISTEN must be "everywhere", or not be set',),
    ),
    Rule(
        "TF_DSGD_THREADS is a number of threads",
        threads,
        PRINTED.filter(lambda text: not text.isdigit())
        | st.integers(max_value=-1).map(str)
        | st.integers(min_value=65536).map(str)
        | st.just("9" * 5000),
        ["0", "4", "65535", ""],
        ("TF_DSGD_THREADS must be a number of threads from 1 to 65535",),
    ),
    Rule(
        "strategies other than averaging need ps tasks",
        without_ps,
        st.sampled_from(
            [
                tf_dsgd.DownpourStrategy,
                tf_dsgd.SoftsyncStrategy,
                tf_dsgd.ElasticAveragingStrategy,
                tf_dsgd.SandblasterStrategy,
            ]
        ),
        [tf_dsgd.PeriodicAveragingStrategy],
        ("The cluster has no ps tasks", 'Add "ps": ["host:port"]', "PeriodicAveragingStrategy"),
        nothing,
        few=True,
    ),
]

# -- the launcher -----------------------------------------------------------------------------


def command(*arguments, **variables):
    """What the launcher makes of a command line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), environment(**variables):
            return launch.parse(arguments)
    except SystemExit as error:
        if error.code != 2:
            raise
        raise Refused(said.getvalue()) from None


def option(name, least):
    """Of a value that is generated, an option of its own: argparse takes "-1" for one."""
    wrong = (
        PRINTED.filter(lambda text: not text.isdigit())
        | st.integers(max_value=least - 1).map(str)
        | st.integers(min_value=10_000).map(str)
        | st.sampled_from(["", "1.0", "1e3", "+1", " 1", "\u0663", "9" * 5000])
    )
    more = [] if name == "--workers" else ["--workers", "2"]
    return Rule(
        f"{name} of the launcher is an integer from {least} to 9999",
        lambda text: command(*more, f"{name}={text}", __file__),
        wrong,
        [str(least), "7", "9999"],
        (f"argument {name}: must be an integer from {least} to 9999",),
        error=Refused,
    )


def launched_listening_to(text):
    return command(*TWO, __file__, TF_DSGD_LISTEN=text)


TWO = ("--workers", "2")
OPTIONS = {"workers", "ps", "spmd", "threads_per_worker", "restart_workers", "prefix_chief"}
OPTIONS |= {"tasks_per_worker"}
NAMES = st.from_regex(r"[a-z]{2,9}", fullmatch=True)
FOLDER = Path(__file__).parent

LAUNCHER = [
    Rule(
        "the launcher knows what TF_DSGD_LISTEN may be",
        launched_listening_to,
        PRINTED.filter(lambda text: text != "everywhere"),
        ["everywhere", ""],
        ('TF_DSGD_LISTEN must be "everywhere", or not be set',),
        error=Refused,
    ),
    option("--workers", 1),
    option("--ps", 0),
    option("--threads_per_worker", 1),
    option("--restart_workers", 0),
    Rule(
        "the launcher's script is a file, or a folder that Python runs",
        lambda path: command(*TWO, path),
        NAMES.map(lambda name: f"no/such/{name}.py") | st.sampled_from(["", str(FOLDER), "~/x.py"]),
        [__file__, tf_dsgd.__file__],
        ("there is no file", "for a module write -m"),
        error=Refused,
    ),
    Rule(
        "the launcher's module is there",
        lambda name: command(*TWO, "-m", name),
        NAMES.map(lambda name: f"no_{name}") | NAMES.map(lambda name: f"no_{name}.train"),
        ["json.tool", "timeit", "tests.configurations.rule", "tf_dsgd.report"],
        ("there is no module", "sys.path"),
        error=Refused,
    ),
    Rule(
        "the launcher has no other options",
        lambda name: command(*TWO, f"--{name}", __file__),
        NAMES.filter(lambda name: name not in {*OPTIONS, "help"})
        | st.sampled_from(["work", "nodes"]),
        ["spmd", "prefix_chief"],
        ("unrecognized arguments",),
        lambda name: f"--{name}",
        error=Refused,
    ),
    Rule(
        "the launcher's workers are so many groups",
        lambda both: command("--workers", str(both[0]), f"--tasks_per_worker={both[1]}", __file__),
        st.tuples(st.integers(1, 40), st.integers(2, 64)).filter(lambda both: both[0] % both[1]),
        [(4, 2), (3, 1), (6, 3)],
        ("makes groups of as many worker processes", "--workers must be a multiple of it"),
        lambda both: f"--tasks_per_worker {both[1]} ",
        error=Refused,
    ),
    Rule(
        "groups of processes are for a strategy with ps tasks",
        lambda more: command("--workers", "4", "--tasks_per_worker", "2", *more, __file__),
        st.sampled_from([("--spmd",), ("--ps", "0"), ("--ps=0",)]),
        [("--ps", "1"), ()],
        ("--tasks_per_worker is for a strategy whose weights are on ps processes",),
        nothing,
        error=Refused,
        few=True,
    ),
    Rule(
        "--spmd starts no ps tasks",
        lambda ps: command(*TWO, "--spmd", *([] if ps is None else ["--ps", str(ps)]), __file__),
        st.integers(0, 9999),
        [None],
        ("--spmd starts no ps processes: leave --ps out, or --spmd",),
        nothing,
        error=Refused,
    ),
    Rule(
        "--spmd starts no worker again",
        lambda count: command(*TWO, "--spmd", "--restart_workers", str(count), __file__),
        st.integers(1, 9999),
        [0],
        ("--spmd cannot start a worker again", "leave --restart_workers"),
        nothing,
        error=Refused,
    ),
    Rule(
        "the launcher is not started by a task of a cluster",
        lambda text: command(*TWO, __file__, TF_CONFIG=text),
        st.sampled_from([GOOD_TEXT, json.dumps({"cluster": CLUSTER})]) | PRINTED,
        ["", " "],
        ("TF_CONFIG is set", "unset TF_CONFIG"),
        error=Refused,
    ),
]

RULES = [*IN_PYTHON, *LAUNCHER]
