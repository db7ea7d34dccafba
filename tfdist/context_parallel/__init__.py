"""Attention by blocks, and over ranks that have different tokens of a sequence."""

from tfdist.context_parallel.attention import KINDS, context_attention
from tfdist.context_parallel.support import check_attention, check_whole_slices

__all__ = ["KINDS", "check_attention", "check_whole_slices", "context_attention"]
