"""Ranks of unequal speed: measured shares, dynamic sharding of data, and adaptive batches."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.unequal_ranks.adaptive_batch import AdaptiveBatch as AdaptiveBatch
    from tfdist.addons.unequal_ranks.dynamic_sharding import DynamicSharding as DynamicSharding
    from tfdist.addons.unequal_ranks.gradient_noise import GradientNoise as GradientNoise

#: Loaded lazily: they need TensorFlow, without which `tfdist-doctor` reads the free memory.
_HOMES = {
    "AdaptiveBatch": "tfdist.addons.unequal_ranks.adaptive_batch",
    "DynamicSharding": "tfdist.addons.unequal_ranks.dynamic_sharding",
    "GradientNoise": "tfdist.addons.unequal_ranks.gradient_noise",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("balancing",))
