"""Attention by blocks of queries and keys, without the scores of all of them at once."""

from tfdist.layers.blockwise.attention import blockwise_attention, default_settings
from tfdist.layers.blockwise.blocks import attend_block, block_gradients, merge
from tfdist.layers.blockwise.grid import Visibility
from tfdist.layers.blockwise.passes import attention_gradients, attention_parts

__all__ = [
    "Visibility",
    "attend_block",
    "attention_gradients",
    "attention_parts",
    "block_gradients",
    "blockwise_attention",
    "default_settings",
    "merge",
]
