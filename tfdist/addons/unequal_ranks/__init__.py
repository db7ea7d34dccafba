"""Ranks that are not equally fast: measured shares, data that is handed out, batches that grow."""

from tfdist.addons.unequal_ranks import balancing
from tfdist.addons.unequal_ranks.dynamic_sharding import DynamicSharding

__all__ = ["DynamicSharding", "balancing"]
