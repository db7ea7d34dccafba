"""Attention where each rank has other tokens of a sequence (context parallelism)."""

from tfdist.context_parallel.attention import KINDS, context_attention
from tfdist.context_parallel.support import check_attention, check_whole_slices

__all__ = ["KINDS", "check_attention", "check_whole_slices", "context_attention"]
