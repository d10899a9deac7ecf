"""Every bad configuration is an error that says what, where and how to mend it."""

import contextlib
import json
import socket
import time

import pytest
import tensorflow as tf

from tf_dsgd.transport import cluster_spec, probing

CHIEF, WORKERS, PS = ["h0:2222"], ["h1:2222", "h2:2222"], ["h3:2222"]
CLUSTER = {"chief": CHIEF, "worker": WORKERS, "ps": PS}
TASK = {"type": "worker", "index": 1}
GOOD = {"cluster": CLUSTER, "task": TASK}


def config(task=TASK, **jobs):
    """TF_CONFIG with some jobs replaced, or left out (None)."""
    cluster = {job: value for job, value in {**CLUSTER, **jobs}.items() if value is not None}
    return json.dumps({"cluster": cluster, "task": task})


def worker(address):
    return config(worker=["h1:2222", address])


# name: (TF_CONFIG, words that its message must have)
BAD = {
    "unset": ("", ["TF_CONFIG is not set", '"worker"']),
    "blank": (" \n", ["TF_CONFIG is not set"]),
    "cut off": ('{"cluster": {', ["not JSON", "line 1", "column 14"]),
    "single quotes": ("{'cluster': {}}", ["not JSON", "line 1, column 2", "near"]),
    "second line": ('{"cluster": {},\n "task" {}}', ["not JSON", "line 2, column 9"]),
    "trailing comma": ('{"cluster": {"ps": ["h:1"],}}', ["not JSON", "line 1", "near"]),
    "nested deeply": ("[" * 200_000, ["nested too deeply"]),
    "list": ("[]", ["JSON object", "a list"]),
    "number": ("3", ["JSON object", "the value 3"]),
    "text": ('"worker"', ["JSON object", "text"]),
    "null": ("null", ["JSON object", "null"]),
    "key twice": (
        '{"cluster": {"worker": ["h:1"], "worker": ["h:2"]}}',
        ['"worker" twice', "Keep one"],
    ),
    "other rpc layer": (json.dumps({**GOOD, "rpc_layer": "grpc+loas"}), ["rpc_layer", "grpc+loas"]),
    "no cluster": (json.dumps({"task": TASK}), ['no "cluster"', '"worker"']),
    "empty object": ("{}", ['no "cluster"']),
    "cluster a list": (json.dumps({"cluster": WORKERS, "task": TASK}), ['["cluster"]', "a list"]),
    "cluster null": (json.dumps({"cluster": None, "task": TASK}), ['["cluster"]', "null"]),
    "cluster empty": (json.dumps({"cluster": {}, "task": TASK}), ['no "worker" tasks', "Add"]),
    "no worker": (config(worker=None), ['no "worker" tasks', "Add"]),
    "workers only": (
        config(ps=None, chief=None),
        ["only worker tasks", 'Add "chief"', 'for those "ps": [', "runs the training script"],
    ),
    "unknown job": (config(workers=["h9:1"]), ['unknown job "workers"', '"chief", "worker"']),
    "evaluator": (config(evaluator=["h9:1"]), ['"evaluator"', "not supported", "validation_data"]),
    "two chiefs": (config(chief=["a:1", "b:1"]), ["2 addresses", "one chief"]),
    "chief and master": (config(master=["h9:1"]), ['both "chief" and "master"']),
    "chief with index 3": (config(chief={"3": "a:1"}), ["index 3", "is 0"]),
    "empty list": (config(ps=[]), ['["ps"]', "empty"]),
    "empty object of tasks": (config(worker={}), ['["worker"]', "empty"]),
    "text for a list": (config(ps="h3:2222"), ['["ps"]', "list of addresses", "text"]),
    "null for a list": (config(ps=None).replace('"worker"', '"ps": null, "worker"', 1), ["null"]),
    "named index": (config(worker={"one": "h1:1"}), ['"one"', "not a task index"]),
    "negative index": (config(worker={"-1": "h1:1"}), ['"-1"', "not a task index"]),
    "index with zero": (config(worker={"1": "h1:1", "01": "h2:1"}), ['"01"', "not a task index"]),
    "same address": (config(worker=["h1:2222", "h1:2222"]), ["worker 0 and worker 1", "same"]),
    "same address, two names": (config(worker=["h1:2222", "H1.:2222"]), ["worker 0 and", "same"]),
    "same address, version 6": (
        config(worker=["[fd00::3]:2222", "[FD00:0::3]:2222"]),
        ["worker 0 and worker 1", "same"],
    ),
    "same address, mapped": (
        config(worker=["10.0.0.1:2222"], ps=["[::ffff:10.0.0.1]:2222"]),
        ["worker 0 and ps 0", "same"],
    ),
    "this machine twice": (config(worker=["[0:0::1]:2222", "localhost.:2222"]), ["same"]),
    "same address in two jobs": (config(ps=["h2:2222"]), ["worker 1 and ps 0", '"h2:2222"']),
    "same but for case": (config(ps=["H2:02222"]), ["worker 1 and ps 0"]),
    "two names of this machine": (
        config(worker=["127.0.0.1:2222"], ps=["localhost:2222"]),
        ["worker 0 and ps 0", '"localhost:2222"'],
    ),
    "its name in IPv6": (
        config(worker=["[::1]:2222"], ps=["LocalHost:2222"]),
        ["worker 0 and ps 0"],
    ),
    "no port": (worker("h2"), ['["worker"][1]', '"h2"', "no port", '"host:port"']),
    "empty port": (worker("h2:"), ['["worker"][1]', "no port"]),
    "port 0": (worker("h2:0"), ['port "0"', "1 to 65535"]),
    "port too large": (worker("h2:65536"), ['port "65536"', "1 to 65535"]),
    "port far too large": (worker("h2:" + "9" * 5000), ["1 to 65535"]),
    "port a word": (worker("h2:http"), ['port "http"', "1 to 65535"]),
    "port negative": (worker("h2:-1"), ['port "-1"']),
    "port in other digits": (worker("h2:\u0661\u0662"), ["1 to 65535"]),
    "no host": (worker(":2222"), ['["worker"][1]', "no host"]),
    "empty address": (worker(""), ["empty", '"host:port"']),
    "scheme": (worker("grpc://h2:2222"), ['Leave "grpc://" out']),
    "path": (worker("h2/x:2222"), ['host "h2/x"']),
    "space": (worker("h 2:2222"), ['host "h 2"']),
    "newline": (worker("h2\n:2222"), ["not a host name"]),
    "unfilled template": (worker("$(HOST):2222"), ['host "$(HOST)"']),
    "IPv6 without brackets": (worker("fd00::3:2222"), ["brackets"]),
    "IPv6 without port": (worker("[fd00::3]"), ["no port"]),
    "address a number": (worker(2222), ['["worker"][1]', "2222", "not text"]),
    "address null": (worker(None), ["not text"]),
    "sparse address": (config(worker={"7": "h1"}), ['["worker"][7]', "no port"]),
    "no task": (json.dumps({"cluster": CLUSTER}), ['no "task"', '"type"']),
    "task a list": (config(task=["worker", 1]), ['["task"]', "a list"]),
    "no type": (config(task={"index": 1}), ['["task"] has no "type"', "role"]),
    "type null": (config(task={"type": None, "index": 1}), ['no "type"']),
    "unknown type": (config(task={"type": "Worker", "index": 1}), ['unknown type "Worker"']),
    "type a list": (config(task={"type": ["worker"], "index": 1}), ["unknown type"]),
    "task evaluator": (config(task={"type": "evaluator", "index": 0}), ["evaluator", "supported"]),
    "no index": (config(task={"type": "worker"}), ['no "index"', "worker"]),
    "index null": (config(task={"type": "ps", "index": None}), ['no "index"']),
    "index a fraction": (config(task={"type": "worker", "index": 0.5}), ["0.5", "not an integer"]),
    "index a float": (config(task={"type": "worker", "index": 1.0}), ["1.0", "not an integer"]),
    "index a bool": (config(task={"type": "worker", "index": True}), ["true", "not an integer"]),
    "index a word": (config(task={"type": "worker", "index": "one"}), ['"one"', "not an integer"]),
    "index a list": (config(task={"type": "worker", "index": [1]}), ["[1]", "not an integer"]),
    "index below 0": (config(task={"type": "worker", "index": -1}), ["-1", "at least 0"]),
    "index too large": (
        config(task={"type": "worker", "index": 2}),
        ["index 2", "2 worker tasks", "0, 1", '"worker"'],
    ),
    "index of one": (config(task={"type": "ps", "index": 7}), ["index 7", "1 ps task,"]),
    "index of the chief": (config(task={"type": "chief", "index": 1}), ["index 1", "1 chief task"]),
    "index left out of a sparse job": (
        config(worker={"0": "a:1", "5": "b:1"}, task={"type": "worker", "index": 1}),
        ["index 1", "0, 5"],
    ),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_bad(text, words):
    with pytest.raises(ValueError) as caught:
        cluster_spec.from_tf_config(text)
    message = str(caught.value)
    assert "TF_CONFIG" in message
    for word in words:
        assert word in message
    assert caught.value.__cause__ is None
    assert len(message) < 600 or "99999" in message


def test_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(GOOD))
    found = cluster_spec.from_tf_config()
    assert found == cluster_spec.Tasks(
        {"chief": {0: "h0:2222"}, "worker": {0: "h1:2222", 1: "h2:2222"}, "ps": {0: "h3:2222"}},
        "worker",
        1,
    )
    assert found.workers == {0: "h1:2222", 1: "h2:2222"}
    assert found.ps == {0: "h3:2222"}
    assert found.chief == "h0:2222"
    assert found.me == "worker 1 at h2:2222"
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ValueError, match="not set"):
        cluster_spec.from_tf_config()


GOOD_ONES = {
    "sparse": (config(worker={"0": "a:1", "5": "b:2"}, task={"type": "worker", "index": 5}), "b:2"),
    "index in quotes": (config(task={"type": "worker", "index": "1"}), "h2:2222"),
    "IPv4": (worker("10.0.0.3:65535"), "10.0.0.3:65535"),
    "IPv6": (worker("[fd00::3]:1"), "[fd00::3]:1"),
    "long name": (worker("w-1.tf_workers.default.svc.:2222"), "w-1.tf_workers.default.svc.:2222"),
    "no chief": (config(chief=None), "h2:2222"),
    "other keys": (json.dumps({**GOOD, "environment": "cloud", "rpc_layer": "grpc"}), "h2:2222"),
}


@pytest.mark.parametrize(("text", "address"), GOOD_ONES.values(), ids=GOOD_ONES)
def test_good(text, address):
    found = cluster_spec.from_tf_config(text)
    assert found.jobs[found.task_type][found.task_index] == address


def test_the_chief_needs_no_index_and_no_address():
    found = cluster_spec.from_tf_config(config(chief=None, task={"type": "chief"}))
    assert (found.chief, found.me, found.task_index) == (None, "chief", 0)


def test_master_is_the_chief():
    text = config(chief=None, master=["m:1"], task={"type": "master", "index": 0})
    assert cluster_spec.from_tf_config(text).me == "chief at m:1"


def test_cluster_spec_of_all_and_of_those_present():
    found = cluster_spec.from_tf_config(json.dumps(GOOD))
    assert found.cluster_spec().as_dict() == CLUSTER
    present = found.cluster_spec({"chief": [0], "worker": {1}, "ps": []})
    assert present.as_dict() == {"chief": CHIEF, "worker": {1: "h2:2222"}}


def test_from_a_cluster_spec():
    found = cluster_spec.from_cluster_spec(
        tf.train.ClusterSpec({"worker": {1: "a:1"}, "ps": ["b:1"]})
    )
    assert found == cluster_spec.Tasks({"worker": {1: "a:1"}, "ps": {0: "b:1"}}, "chief", 0)
    assert cluster_spec.from_cluster_spec(tf.train.ClusterSpec(CLUSTER)).me == "chief at h0:2222"


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({}, 'no "worker"'),
        ({"worker": WORKERS}, "only worker tasks"),
        ({"worker": WORKERS, "ps": ["b"]}, r'\["ps"\]\[0\] is "b", which has no port'),
        ({"worker": {4: "grpc://a:1"}, "ps": PS}, r'\["worker"\]\[4\].*scheme'),
        ({"local": ["b:1"]}, 'unknown job "local"'),
        ({"worker": [], "ps": PS}, r'\["worker"\] is empty'),
    ],
)
def test_a_bad_cluster_spec(jobs, words):
    with pytest.raises(ValueError, match=f"the ClusterSpec.*{words}"):
        cluster_spec.from_cluster_spec(tf.train.ClusterSpec(jobs))


def resolver(**options):
    spec = tf.train.ClusterSpec(CLUSTER)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, **options)


def test_from_a_resolver():
    assert cluster_spec.from_resolver(resolver()).me == "chief at h0:2222"
    assert cluster_spec.from_resolver(resolver(task_type="ps", task_id=0)).me == "ps 0 at h3:2222"
    assert cluster_spec.from_resolver(resolver(task_type="master")).me == "chief at h0:2222"
    with pytest.raises(ValueError, match="SimpleClusterResolver has the index 2"):
        cluster_spec.from_resolver(resolver(task_type="worker", task_id=2))
    with pytest.raises(ValueError, match='SimpleClusterResolver has the unknown type "boss"'):
        cluster_spec.from_resolver(resolver(task_type="boss", task_id=2))


def test_from_the_resolver_that_reads_tf_config(monkeypatch):
    found = tf.distribute.cluster_resolver.TFConfigClusterResolver
    monkeypatch.setenv("TF_CONFIG", json.dumps(GOOD))
    assert cluster_spec.from_resolver(found()).me == "worker 1 at h2:2222"
    monkeypatch.setenv("TF_CONFIG", config(task={"type": "worker", "index": 7}))
    with pytest.raises(ValueError, match=r"TF_CONFIG.*index 7"):
        cluster_spec.from_resolver(found())


def test_a_resolver_that_fails():
    class Broken(tf.distribute.cluster_resolver.SimpleClusterResolver):
        def cluster_spec(self):
            raise KeyError("SLURM_JOB_ID")

    with pytest.raises(ValueError, match=r"Broken.*KeyError.*SLURM_JOB_ID.*TF_CONFIG"):
        cluster_spec.from_resolver(Broken(tf.train.ClusterSpec(CLUSTER)))


def test_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert probing.reachable(address, 5.0)
    assert not probing.reachable(address, 5.0)
    assert not probing.reachable("no-such-host.invalid:1", 5.0)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("not.a.host.invalid", ["'not.a.host.invalid'", "cannot be resolved here"]),
        ("192.0.2.1", ["'192.0.2.1'", "no address of this machine"]),  # RFC 5737: nobody's
        ("127.0.0.1", []),
        ("localhost", []),
        ("[::1]", []),
    ],
)
def test_an_own_address_that_others_may_not_find(host, words, monkeypatch):
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("TF_CONFIG", worker(f"{host}:2222"))
    doubts = cluster_spec.doubts_about_own_host(cluster_spec.from_tf_config())
    assert (doubts is None) == (not words)
    for word in [*words, "worker 1", "TF_CONFIG"] if words else []:
        assert word in doubts


def test_who_answers():
    """Linux accepts connections for a process that is stopped; only a gRPC server answers."""
    server = tf.distribute.Server.create_local_server()
    good = server.target.removeprefix("grpc://")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        names = [f"127.0.0.1:{each.getsockname()[1]}" for each in (mute, closed)]
        assert [probing.reachable(name, 1.0) for name in [good, *names]] == [True, True, False]
        assert probing.answers(good, 10.0)
        assert not probing.answers(names[0], 0.2)
        assert probing.not_answering([good, *names], 1.0) == set(names)
    assert probing.not_answering([], 1.0) == set()


@contextlib.contextmanager
def cut_off():
    """An address that neither takes nor refuses a connection, as of a host that is gone."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def test_those_that_are_cut_off_take_no_time_from_others():
    server = tf.distribute.Server.create_local_server()
    good = server.target.removeprefix("grpc://")
    with contextlib.ExitStack() as stack:
        gone = [stack.enter_context(cut_off()) for _ in range(12)]
        assert not any(probing.reachable(address, 0.02) for address in gone)
        for address in gone:  # whichever of the two is asked first
            assert probing.not_answering([good, address], 0.3) == {address}
        start = time.monotonic()
        assert probing.not_answering([good, *gone], 1.0) == set(gone)
        assert time.monotonic() - start < 1.9  # and not so long for each


def test_who_refuses():
    """Nobody who listens, or may be cut off for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as server, cut_off() as gone:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert probing.refusing([address, gone], 0.1) == set()
    assert probing.refusing([address, "no-such-host.invalid:1"], 1.0) == {address}


def test_a_name_of_several_places_is_asked_at_each(monkeypatch):
    """As "localhost", which is ::1, too, where nobody listens."""
    server = tf.distribute.Server.create_local_server()
    port = server.target.rsplit(":", 1)[1]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        places = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, int(place)))
            for host, place in (closed.getsockname(), ("127.0.0.1", port))
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(places))
        assert probing.answers(f"two.places:{port}", 5.0)
        places.reverse()
        assert probing.answers(f"two.others:{port}", 5.0)
        del places[0]
        assert not probing.answers(f"one.place:{port}", 5.0)
