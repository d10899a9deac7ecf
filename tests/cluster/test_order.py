"""The order of a round's operations in the graphs that TensorFlow made of it on a cluster.

All that touches a shard is under the shard's lock, but for lookups in tables split by rows: in a
round these come after the fetch, so that no row is older than the version that was fetched.
"""

import tensorflow as tf
from google.protobuf import text_format

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, measures_no_seconds
from tests.cluster.scripts import dumped_graphs
from tests.graphs import Graph

PHASE = "after_graph_optimization"


def graphs(folder, function):
    found = folder.glob(f"__inference_{function}_*.{PHASE}.pbtxt")
    return [Graph(text_format.Parse(f.read_text(), tf.compat.v1.GraphDef())) for f in sorted(found)]


@measures_no_seconds
def test_no_operation_on_a_variable_is_without_order_and_none_of_a_shard_without_lock(tmp_path):
    told = {
        "TF_DUMP_GRAPH_PREFIX": str(tmp_path),
        "TF_DUMP_GRAPH_NAME_FILTER": "*",
        "TF_DUMP_GRAPH_GROUPS": "main",
    }
    script = str(SCRIPTS / "dumped_graphs.py")
    with processes.started(*MODULE, "--workers", "2", "--ps", "2", script, **told) as process:
        for name in dumped_graphs.STRATEGIES:
            assert process.line_with(f"TRAINED {name}", 240.0).endswith(" 12")
        assert exit_of(process, 60.0)[0] == 0, log(process)
    seen = looked_up = 0
    for function in ("whole_round", "push", "fetching", "flush", "work_on"):
        for graph in graphs(tmp_path, function):
            assert graph.without_order() == [], function
            of_shards = {n for n in graph.on_resources() if "/job:ps" in graph.device(n)}
            lookups = {name for name in graph.all("ResourceGather") if "lookup" in name}
            assert {n for n in of_shards if not graph.is_under_lock(n)} == of_shards & lookups
            seen += len(of_shards - lookups) > 0
            if function == "whole_round":
                assert [name for name in lookups if not graph.is_after_lock(name)] == []
                looked_up += len(lookups)
    assert seen >= len(dumped_graphs.STRATEGIES)
    assert looked_up >= 4  # of two strategies, on each shard
