"""Asynchronous and communication-saving distributed SGD in plain Keras 3 `model.fit`.

strategy = tf_dsgd.DownpourStrategy(push_every=10, fetch_every=10)
with strategy.scope():
    model = keras.Sequential([...])
    model.compile(optimizer="adagrad", loss="mse")
model.fit(x, y, batch_size=64, epochs=5)
"""

from tf_dsgd import _requirements
from tf_dsgd._version import __version__ as __version__

__all__ = [
    "CompressedAsyncStrategy",
    "DownpourStrategy",
    "ElasticAveragingStrategy",
    "Exponential",
    "HogwildStrategy",
    "LocalCluster",
    "LocalSGD",
    "LogNormal",
    "ModelParallel",
    "Pareto",
    "PeriodicAveragingStrategy",
    "Rows",
    "SandblasterStrategy",
    "SimulatedCluster",
    "Simulation",
    "SoftsyncStrategy",
    "Straggler",
    "TFCluster",
    "callbacks",
    "compression",
    "faults",
    "gpu",
    "optimizers",
    "simulate",
]

if _requirements.is_program():
    _requirements.end_at_once_on_ctrl_c()
    _requirements.check_installed()  # importing TensorFlow and Keras takes 5 s
else:
    with _requirements.ended_by_ctrl_c():
        _requirements.check()  # first: it says what is missing
        from tf_dsgd import callbacks, compression, gpu, optimizers
        from tf_dsgd.cluster import LocalCluster, SimulatedCluster, TFCluster
        from tf_dsgd.simulation import faults
        from tf_dsgd.simulation.delays import Exponential, LogNormal, Pareto, Straggler
        from tf_dsgd.simulation.simulate import Simulation, simulate
        from tf_dsgd.strategies.averaging import PeriodicAveragingStrategy
        from tf_dsgd.strategies.downpour import DownpourStrategy, LocalSGD
        from tf_dsgd.strategies.elastic import ElasticAveragingStrategy
        from tf_dsgd.strategies.hogwild import HogwildStrategy
        from tf_dsgd.strategies.parts.model_parallel import ModelParallel
        from tf_dsgd.strategies.peers import CompressedAsyncStrategy
        from tf_dsgd.strategies.rows.tables import Rows
        from tf_dsgd.strategies.sandblaster import SandblasterStrategy
        from tf_dsgd.strategies.softsync import SoftsyncStrategy

        _requirements.spare_what_is_imported()
