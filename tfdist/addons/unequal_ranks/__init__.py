"""Ranks of unequal speed: measured shares, dynamic sharding of data, and adaptive batches."""

from tfdist.addons.unequal_ranks import balancing as balancing
from tfdist.addons.unequal_ranks.adaptive_batch import AdaptiveBatch
from tfdist.addons.unequal_ranks.dynamic_sharding import DynamicSharding
from tfdist.addons.unequal_ranks.gradient_noise import GradientNoise

__all__ = ["AdaptiveBatch", "DynamicSharding", "GradientNoise"]
