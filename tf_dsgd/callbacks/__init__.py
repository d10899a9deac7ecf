"""Keras callbacks."""

from tf_dsgd.callbacks.averaging import PeriodicAveraging
from tf_dsgd.callbacks.backup import BackupAndRestore
from tf_dsgd.callbacks.staleness import StalenessMonitor

__all__ = ["BackupAndRestore", "PeriodicAveraging", "StalenessMonitor"]
