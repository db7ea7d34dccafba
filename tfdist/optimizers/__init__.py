"""Optimizers for slow links: whose ranks train apart for some steps, or whose momentum is compressed."""

from tfdist.optimizers.diloco import DiLoCo
from tfdist.optimizers.local_sgd import LocalSGD
from tfdist.optimizers.one_bit_adam import OneBitAdam
from tfdist.optimizers.slowmo import SlowMo

__all__ = ["DiLoCo", "LocalSGD", "OneBitAdam", "SlowMo"]
