"""Mixture of experts: the layer, and its router, dispatch, grouped products and losses."""

from tfdist.experts.layer import MixtureOfExperts

__all__ = ["MixtureOfExperts"]
