"""Codecs, which make messages smaller: `compression=` of Downpour and softsync."""

from tf_dsgd.compression.cast import Cast
from tf_dsgd.compression.efsign import EFSign
from tf_dsgd.compression.onebit import OneBit
from tf_dsgd.compression.powersgd import PowerSGD
from tf_dsgd.compression.qsgd import QSGD
from tf_dsgd.compression.threshold import Threshold
from tf_dsgd.compression.topk import TopK

__all__ = ["QSGD", "Cast", "EFSign", "OneBit", "PowerSGD", "Threshold", "TopK"]
