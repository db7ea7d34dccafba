"""The layer of experts: router, dispatch, grouped products, losses."""

from tfdist.experts.layer import MixtureOfExperts

__all__ = ["MixtureOfExperts"]
