"""Attention by blocks of queries and keys, without all scores in memory at once."""

from tfdist.context_parallel.blockwise.attention import (
    blockwise_attention,
    default_settings,
    fits_whole,
)
from tfdist.context_parallel.blockwise.blocks import attend_block, merge
from tfdist.context_parallel.blockwise.grid import Visibility
from tfdist.context_parallel.blockwise.passes import attention_gradients, attention_parts

__all__ = [
    "Visibility",
    "attend_block",
    "attention_gradients",
    "attention_parts",
    "blockwise_attention",
    "default_settings",
    "fits_whole",
    "merge",
]
