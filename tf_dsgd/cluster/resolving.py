"""What stands for a cluster in a strategy's argument."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tf_dsgd.cluster.base import Cluster
from tf_dsgd.cluster.local import LocalCluster
from tf_dsgd.cluster.tasks import TFCluster


def resolve(cluster: Any) -> Cluster:
    """The cluster that a strategy's `cluster` argument stands for."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, (tf.distribute.cluster_resolver.ClusterResolver, tf.train.ClusterSpec)):
        return TFCluster(cluster)
    if cluster is not None:
        number = isinstance(cluster, int) and not isinstance(cluster, bool)
        raise TypeError(
            "cluster must be a tf_dsgd.LocalCluster, TFCluster or SimulatedCluster, a "
            f"ClusterResolver, a ClusterSpec, or None. Received: {cluster!r}."
            + f" For {cluster} workers: tf_dsgd.LocalCluster({cluster})."
            * number
        )
    return TFCluster() if os.environ.get("TF_CONFIG", "").strip() else LocalCluster()
