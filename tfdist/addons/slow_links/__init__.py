"""Training over slow links: compressed gradients with error feedback, and local optimizers."""

from tfdist.addons.slow_links.compressor import Compressor
from tfdist.addons.slow_links.local_sgd.diloco import DiLoCo
from tfdist.addons.slow_links.local_sgd.local_sgd import LocalSGD
from tfdist.addons.slow_links.local_sgd.slowmo import SlowMo
from tfdist.addons.slow_links.one_bit import OneBit
from tfdist.addons.slow_links.one_bit_adam import OneBitAdam
from tfdist.addons.slow_links.power_sgd import PowerSGD
from tfdist.addons.slow_links.quantization import Int4, Int8
from tfdist.addons.slow_links.statistics import compression_statistics
from tfdist.addons.slow_links.top_k import TopK

__all__ = [
    "Compressor",
    "DiLoCo",
    "Int4",
    "Int8",
    "LocalSGD",
    "OneBit",
    "OneBitAdam",
    "PowerSGD",
    "SlowMo",
    "TopK",
    "compression_statistics",
]
