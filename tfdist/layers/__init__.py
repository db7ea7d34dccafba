"""Keras layers that split themselves over the tensor axis of the strategy in scope.

Where the tensor axis is 1 or there is no strategy, each is its ordinary Keras self.
"""

from tfdist.layers.attention import ParallelMultiHeadAttention
from tfdist.layers.blockwise import blockwise_attention
from tfdist.layers.dense import ColumnParallelDense, RowParallelDense
from tfdist.layers.dropout import Dropout
from tfdist.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from tfdist.layers.experts import MixtureOfExperts
from tfdist.layers.feed_forward import ParallelMLP
from tfdist.layers.losses import VocabParallelCrossEntropy
from tfdist.layers.normalization import LayerNormalization
from tfdist.layers.positions import PositionEmbedding
from tfdist.layers.transformer import TransformerDecoderBlock

__all__ = [
    "ColumnParallelDense",
    "Dropout",
    "LayerNormalization",
    "MixtureOfExperts",
    "ParallelMLP",
    "ParallelMultiHeadAttention",
    "PositionEmbedding",
    "RowParallelDense",
    "TransformerDecoderBlock",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "blockwise_attention",
]
