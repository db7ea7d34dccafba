"""Optimizers under which ranks train apart, and average what they have learned every so many steps."""

from tfdist.optimizers.diloco import DiLoCo
from tfdist.optimizers.local_sgd import LocalSGD
from tfdist.optimizers.slowmo import SlowMo

__all__ = ["DiLoCo", "LocalSGD", "SlowMo"]
