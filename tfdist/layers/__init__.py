"""Keras layers that split themselves over the ranks of the strategy in scope.

They split over the tensor axis. Where that is one rank or there is no strategy, each is its ordinary
Keras self.
"""

from tfdist.context_parallel.blockwise import blockwise_attention
from tfdist.layers.attention import ParallelMultiHeadAttention
from tfdist.layers.dense import ColumnParallelDense, RowParallelDense
from tfdist.layers.dropout import Dropout
from tfdist.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from tfdist.layers.feed_forward import ParallelMLP
from tfdist.layers.losses import VocabParallelCrossEntropy
from tfdist.layers.normalization import LayerNormalization, RMSNormalization
from tfdist.layers.positions import PositionEmbedding

__all__ = [
    "ColumnParallelDense",
    "Dropout",
    "LayerNormalization",
    "ParallelMLP",
    "ParallelMultiHeadAttention",
    "PositionEmbedding",
    "RowParallelDense",
    "RMSNormalization",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "blockwise_attention",
]
