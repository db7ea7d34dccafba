"""Compression of gradients, with error feedback: see docs/slow_links.md."""

from tfdist.compression.compressor import Compressor
from tfdist.compression.one_bit import OneBit
from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.quantization import Int4, Int8
from tfdist.compression.top_k import TopK

__all__ = ["Compressor", "Int4", "Int8", "OneBit", "PowerSGD", "TopK"]
