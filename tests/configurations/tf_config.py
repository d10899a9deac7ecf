"""Rules of TF_CONFIG."""

import json
import os
from unittest import mock

from hypothesis import strategies as st

from tests.configurations.rule import Rule
from tf_dsgd.transport import cluster_spec

WORKERS = ["h1:2222", "h2:2222"]
CLUSTER = {"chief": ["h0:2222"], "worker": WORKERS, "ps": ["h3:2222"]}
TASK = {"type": "chief", "index": 0}
GOOD = {"cluster": CLUSTER, "task": TASK}


def environment(**variables):
    return mock.patch.dict(os.environ, variables)


def tf_config(text, **options):
    """What the environment variable says; a strategy, too, refuses what this refuses."""
    with environment(TF_CONFIG=text):
        return cluster_spec.from_tf_config(**options)


def of_config(value):
    return tf_config(json.dumps(value))


def of_jobs(value=None, task=TASK, **jobs):
    """A good cluster with some jobs replaced, or left out."""
    cluster = {job: place for job, place in {**CLUSTER, **jobs}.items() if place is not None}
    return of_config({"cluster": {**cluster, **(value or {})}, "task": task})


def of_address(address):
    return of_jobs(worker=["h1:2222", address])


def of_task(task):
    return of_config({"cluster": CLUSTER, "task": task})


def of_type(kind):
    return of_task({"type": kind, "index": 0})


def of_index(index):
    return of_task({"type": "worker", "index": index})


def in_quotes(value):
    return json.dumps(value)


def kind(value):
    """How messages call a value of JSON."""
    named = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return named.get(type(value), f"the value {json.dumps(value)}")


def nothing(value):
    return ""


TEXTS = st.text(max_size=6)
SCALARS = TEXTS | st.integers(-99, 99) | st.booleans() | st.none() | st.floats(-9, 9)
LISTS = st.lists(st.integers(0, 9), max_size=3)
OBJECTS = st.dictionaries(TEXTS, st.integers(0, 9), max_size=2)
HOSTS = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
PORTS = st.integers(1, 65535)
ADDRESSES = st.tuples(HOSTS, PORTS).map(lambda both: f"{both[0]}:{both[1]}")
MANY = st.lists(ADDRESSES, min_size=2, max_size=5, unique=True)
JOBS = st.sampled_from(["worker", "ps", "chief"])
DOTTED = st.lists(st.integers(0, 999), min_size=2, max_size=6).map(
    lambda parts: ".".join(map(str, parts))
)
GOOD_TEXT = json.dumps(GOOD)


ZEROS = st.lists(st.sampled_from(["0", "00", "0000"]), max_size=3)


def is_ip(text):
    parts = text.split(".")
    return len(parts) == 4 and all(int(part) < 256 for part in parts)


def with_keys(keys):
    more = "".join(f", {json.dumps(key)}: 1" for key in keys)
    return tf_config(f"{GOOD_TEXT[:-1]}{more}}}")


def has_same(value):
    """Workers, of which one, differently written, is a ps as well."""
    addresses, which, written = value
    host, port = addresses[which % len(addresses)].split(":")
    alike = {"same": f"{host}:{port}", "upper": f"{host.upper()}:{port}", "zero": f"{host}:0{port}"}
    other = {"port": f"{host}:1", "host": f"{host}.other:{port}"}
    return of_jobs(worker=addresses, ps=[{**alike, **other}[written]])


def of_indices(value):
    """Task `index` of a job whose addresses have these indices."""
    indices, index = value
    places = {str(i): f"w{i}:2222" for i in indices}
    return of_jobs(worker=places, task={"type": "worker", "index": index})


def equal_processes(cluster):
    task = {"type": "worker", "index": 0}
    return tf_config(json.dumps({"cluster": cluster, "task": task}), ps=False)


FORMAT = [
    Rule(
        "TF_CONFIG is not blank where it is asked for",
        tf_config,
        st.text(" \t\n", max_size=5),
        [GOOD_TEXT],
        ("TF_CONFIG is not set or empty", '"worker"'),
        nothing,
    ),
    Rule(
        "TF_CONFIG is JSON",
        tf_config,
        st.integers(1, len(GOOD_TEXT) - 1).map(lambda n: GOOD_TEXT[:n])
        | st.sampled_from([repr(GOOD), GOOD_TEXT + "}", GOOD_TEXT.replace(":", "="), "worker 0"]),
        [GOOD_TEXT, f" {GOOD_TEXT}\n", json.dumps(GOOD, indent=4)],
        ("TF_CONFIG is not JSON", "at line 1, column", '"worker"'),
        nothing,
    ),
    Rule(
        "TF_CONFIG is an object",
        of_config,
        SCALARS | LISTS,
        [GOOD],
        ("TF_CONFIG must be a JSON object",),
        kind,
    ),
    Rule(
        "TF_CONFIG has every key once",
        with_keys,
        st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(lambda keys: [*keys, keys[0]])
        | st.sampled_from([["cluster"], ["task"], ["a", "task"]]),
        [[], ["a", "b", "Cluster"]],
        ("TF_CONFIG has the key", "twice", "Keep one of them"),
        lambda keys: in_quotes(keys[-1]),
    ),
    Rule(
        "TF_CONFIG has no number that is absurdly long",
        lambda digits: tf_config(f'{GOOD_TEXT[:-1]}, "more": {"1" * digits}}}'),
        st.integers(21, 9999),
        [1, 20],
        ("TF_CONFIG has a number of",),
        lambda digits: f"{digits} digits",
    ),
    Rule(
        'rpc_layer is "grpc" or left out',
        lambda layer: of_config({**GOOD, "rpc_layer": layer}),
        SCALARS | st.sampled_from(["grpc+loas", "GRPC", "http"]),
        ["grpc"],
        ('TF_CONFIG["rpc_layer"]', 'only "grpc" is supported'),
        in_quotes,
    ),
    Rule(
        'TF_CONFIG has a "cluster"',
        of_config,
        OBJECTS | st.sampled_from([{"Cluster": CLUSTER, "task": TASK}, {"task": TASK}, CLUSTER]),
        [GOOD],
        ('TF_CONFIG has no "cluster"', '"worker"'),
        nothing,
    ),
    Rule(
        '"cluster" is an object of jobs',
        lambda cluster: of_config({"cluster": cluster, "task": TASK}),
        SCALARS | LISTS,
        [CLUSTER],
        ('TF_CONFIG["cluster"] must be an object of jobs',),
        kind,
    ),
]

JOBS_AND_ADDRESSES = [
    Rule(
        "the jobs are chief, worker and ps",
        lambda job: of_jobs({job: ["h9:1"]}),
        (TEXTS | st.sampled_from(["workers", "Worker", "parameter_server", "localhost"])).filter(
            lambda job: job not in {"chief", "master", "worker", "ps", "evaluator"}
        ),
        ["worker"],
        ('TF_CONFIG["cluster"] has an unknown job', '"chief", "worker" and "ps"'),
        in_quotes,
    ),
    Rule(
        "there is no evaluator",
        lambda addresses: of_jobs(evaluator=addresses),
        MANY | st.lists(ADDRESSES, min_size=1, max_size=1),
        [None],
        ('"evaluator"', "not supported", "validation_data"),
        nothing,
    ),
    Rule(
        "there are workers",
        lambda jobs: of_config({"cluster": jobs, "task": TASK}),
        st.dictionaries(st.sampled_from(["chief", "ps"]), st.tuples(ADDRESSES)).map(
            lambda jobs: {job: [f"{job}{place}"] for job, (place,) in jobs.items()}
        ),
        [CLUSTER],
        ('TF_CONFIG["cluster"] has no "worker" tasks', 'Add "worker": ["host:port", ...]'),
        nothing,
    ),
    Rule(
        "there is one chief",
        lambda addresses: of_jobs(chief=addresses),
        MANY,
        [["h0:1"], None],
        ('TF_CONFIG["cluster"]["chief"] has', "A cluster has one chief"),
        lambda addresses: f"{len(addresses)} addresses",
    ),
    Rule(
        "the chief has the index 0",
        lambda index: of_jobs(chief={str(index): "h0:1"}),
        st.integers(1, 10**9 - 1),
        [0],
        ('TF_CONFIG["cluster"]["chief"]', "Its index is 0"),
        lambda index: f"index {index}",
    ),
    Rule(
        'the chief is not named "master" as well',
        lambda addresses: of_jobs(master=addresses),
        st.tuples(ADDRESSES),
        [None],
        ('both "chief" and "master"', "Keep one of them"),
        nothing,
    ),
    Rule(
        "a cluster of a strategy has a chief or ps tasks",
        lambda jobs: of_jobs({"worker": WORKERS, **jobs}, chief=None, ps=None),
        MANY.map(lambda workers: {"worker": workers}),
        [{"chief": ["h0:1"]}, {"ps": ["h3:1"]}],
        ("has only worker tasks", 'Add "chief": ["host:port"]'),
        nothing,
    ),
    Rule(
        "a job is a list of addresses, or an object from index to address",
        lambda given: of_jobs(**{given[0]: given[1]}),
        st.tuples(JOBS, SCALARS.filter(lambda value: value is not None)),
        [("worker", ["h:1"]), ("worker", {"0": "h:1"}), ("ps", {"7": "h:1"})],
        ("must be a list of addresses, or an object from index to address",),
        lambda given: f'["{given[0]}"] must be',
    ),
    Rule(
        "a job is not empty",
        lambda given: of_jobs(**{given[0]: given[1]}),
        st.tuples(JOBS, st.sampled_from([[], {}])),
        [("worker", ["h:1"]), ("ps", None), ("chief", None)],
        ("is empty", "leave the job out"),
        lambda given: f'["{given[0]}"] is empty',
        few=True,
    ),
    Rule(
        "the keys of a job are indices of tasks",
        lambda key: of_jobs(worker={"0": "h1:1", key: "h2:1"}),
        (TEXTS | st.sampled_from(["-1", "01", "1.0", " 1", "1e3", "\u0663", "worker1"])).filter(
            lambda key: not (key.isascii() and key.isdigit() and str(int(key)) == key)
        ),
        ["1", "17"],
        ('TF_CONFIG["cluster"]["worker"] has the key', "not a task index", "0, 1, 2"),
        in_quotes,
    ),
    Rule(
        "an address is text",
        of_address,
        st.integers(-99999, 99999) | st.none() | st.booleans() | LISTS | OBJECTS,
        ["h2:1"],
        ('TF_CONFIG["cluster"]["worker"][1] is', "not text", 'Write "host:port"'),
        in_quotes,
    ),
    Rule(
        "an address has a port",
        of_address,
        HOSTS | HOSTS.map(lambda host: f"{host}:") | st.just("[fd00::3]"),
        ["h2:1"],
        ('["worker"][1] is', "which has no port", 'Write "host:port"'),
        in_quotes,
    ),
    Rule(
        "a port is a number from 1 to 65535",
        lambda port: of_address(f"h2:{port}"),
        st.integers(max_value=0)
        | st.integers(min_value=65536, max_value=10**30)
        | st.from_regex(r"[a-z]{1,5}|[0-9]+\.[0-9]+|0x[0-9a-f]+|[0-9]+/", fullmatch=True),
        [1, 2222, 65535, "08080"],
        ('["worker"][1] is', "whose port", "is not a number from 1 to 65535"),
        lambda port: in_quotes(str(port)),
    ),
    Rule(
        "a host is a host name or an IP address",
        lambda host: of_address(f"{host}:2222"),
        st.tuples(HOSTS, st.sampled_from([*" $()*?!@,;'\\", "\n", "é"]), HOSTS).map("".join)
        | DOTTED.filter(lambda text: not is_ip(text))
        | st.sampled_from(["$(HOST)", "h/x", "-h", "[fd00::g]", "[1.2.3.4]", "[fd00:::3]", "."]),
        ["h", "w-1.tf_jobs.svc.", "10.0.0.3", "255.255.255.255", "[fd00::3]"],
        ('["worker"][1] is', "is not a host name or IP address", 'Write "host:port"'),
        in_quotes,
    ),
    Rule(
        "an address is one of a machine's",
        lambda host: of_address(f"{host}:2222"),
        st.sampled_from(["0.0.0.0", "[0:0:0:0:0:0:0:0]", "[::0.0.0.0]"])
        | st.tuples(ZEROS, ZEROS).map(lambda s: f"[{':'.join(s[0])}::{':'.join(s[1])}]"),
        ["10.0.0.0", "0.0.0.1", "[::1]", "a0"],
        ('["worker"][1] is', "all of a machine's addresses", 'Write "host:port"'),
        lambda host: in_quotes(f"{host}:2222"),
    ),
    Rule(
        "an address has a host",
        of_address,
        PORTS.map(lambda port: f":{port}"),
        ["h:1"],
        ('["worker"][1] is', "which has no host"),
        in_quotes,
    ),
    Rule(
        "an address has no scheme",
        of_address,
        st.tuples(HOSTS, ADDRESSES).map("://".join),
        ["h2:2222"],
        ('["worker"][1] is', "begins with a scheme", '://" out'),
        in_quotes,
    ),
    Rule(
        "an IPv6 address stands in brackets",
        of_address,
        st.lists(st.integers(0, 65535), min_size=2, max_size=8).map(
            lambda parts: ":".join(f"{part:x}" for part in parts) + ":2222"
        ),
        ["[fd00::3]:2222"],
        ('["worker"][1] is', "IPv6 addresses stand in brackets"),
        in_quotes,
    ),
    Rule(
        "no two tasks have the same address",
        has_same,
        st.tuples(MANY, st.integers(0, 9), st.sampled_from(["same", "upper", "zero"])),
        [(WORKERS, 0, "port"), (WORKERS, 1, "host")],
        ("the same address", "Every task needs a host and port of its own"),
        lambda value: f"worker {value[1] % len(value[0])} and ps 0",
    ),
]

THE_TASK = [
    Rule(
        'TF_CONFIG has a "task"',
        lambda more: of_config({"cluster": CLUSTER, **more}),
        OBJECTS.map(lambda more: {f"{key}_": value for key, value in more.items()}),
        [{"task": TASK}],
        ('TF_CONFIG has no "task"', '"type"'),
        nothing,
    ),
    Rule(
        '"task" is an object',
        of_task,
        SCALARS | LISTS,
        [TASK],
        ('TF_CONFIG["task"] must be an object with "type" and "index"',),
        kind,
    ),
    Rule(
        "the task has a type",
        of_task,
        st.dictionaries(st.sampled_from(["index", "Type", "job"]), st.integers(0, 1))
        | st.sampled_from([{"type": None}, {"type": ""}, {"type": None, "index": 0}]),
        [TASK],
        ('TF_CONFIG["task"] has no "type"', '"chief", "worker" or "ps"'),
        nothing,
    ),
    Rule(
        "the type of the task is chief, worker or ps",
        of_type,
        (TEXTS | st.integers(1, 9) | st.sampled_from(["Worker", "workers", "PS", "boss"])).filter(
            lambda kind: kind not in {"", "chief", "master", "worker", "ps", "evaluator"}
        ),
        ["chief", "worker", "ps"],
        ('TF_CONFIG["task"] has the unknown type', '"chief", "worker" and "ps"'),
        in_quotes,
    ),
    Rule(
        "a worker or ps has an index",
        of_task,
        st.tuples(st.sampled_from(["worker", "ps"]), OBJECTS).map(
            lambda both: {"type": both[0], **{f"{k}_": v for k, v in both[1].items()}}
        ),
        [{"type": "chief"}, {"type": "worker", "index": 0}],
        ('TF_CONFIG["task"] has no "index"', 'Add "index": 0'),
        nothing,
    ),
    Rule(
        "the index of the task is an integer of at least 0",
        of_index,
        st.integers(max_value=-1, min_value=-(10**15))
        | st.booleans()
        | st.floats()
        | LISTS
        | TEXTS.filter(lambda text: not text.isdigit()),
        [0, 1, "1"],
        ('TF_CONFIG["task"] has the index', "is not an integer of at least 0", "0, 1"),
        in_quotes,
    ),
    Rule(
        "the index of the task is one of its job",
        of_indices,
        st.tuples(st.sets(st.integers(0, 9), min_size=1), st.integers(0, 99)).filter(
            lambda both: both[1] not in both[0]
        ),
        [({0, 1, 2}, 2), ({0, 5}, 5)],
        ('TF_CONFIG["task"] has the index', "Correct the index, or add the address of task"),
        lambda both: f"index {both[1]}, but the cluster has {len(both[0])} worker task",
    ),
    Rule(
        "equal processes have no ps tasks",
        lambda ps: equal_processes({"worker": WORKERS, **({"ps": ps} if ps else {})}),
        MANY | st.lists(ADDRESSES, min_size=1, max_size=1),
        [None],
        ("has ps tasks, but here every process trains a model of its own", "--spmd"),
        nothing,
    ),
    Rule(
        "equal processes are numbered without gaps",
        lambda indices: equal_processes({"worker": {str(i): f"w{i}:1" for i in {0, *indices}}}),
        st.sets(st.integers(2, 40), min_size=1, max_size=5),
        [set(), {1}, {1, 2}],
        ('TF_CONFIG["cluster"]["worker"] has the indices 0, ', "Name all tasks, from 0 on"),
        lambda indices: str(max(indices)),
    ),
]

RULES = [*FORMAT, *JOBS_AND_ADDRESSES, *THE_TASK]
