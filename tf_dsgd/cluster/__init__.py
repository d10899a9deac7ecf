"""Where workers and shards are: threads, tasks of a cluster, or simulated."""

from tf_dsgd.cluster.base import Cluster as Cluster
from tf_dsgd.cluster.local import LocalCluster as LocalCluster
from tf_dsgd.cluster.resolving import resolve as resolve
from tf_dsgd.cluster.simulated import SimulatedCluster as SimulatedCluster
from tf_dsgd.cluster.tasks import TFCluster as TFCluster
