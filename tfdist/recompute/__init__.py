"""Activation recomputation: the backward pass computes activations again instead of keeping them."""

from tfdist.recompute.model import recompute

__all__ = ["recompute"]
