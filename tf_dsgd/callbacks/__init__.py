"""Keras callbacks."""

from tf_dsgd.callbacks.backup import BackupAndRestore

__all__ = ["BackupAndRestore"]
