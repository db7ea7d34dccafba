"""Keras layers that split themselves over the ranks of the strategy in scope.

`ShardedEmbedding` splits its tables over the ranks that hold different rows; all others split over the
tensor axis. Where that is one rank or there is no strategy, each is its ordinary Keras self.
"""

from tfdist.context_parallel.blockwise import blockwise_attention
from tfdist.experts import MixtureOfExperts
from tfdist.layers.attention import ParallelMultiHeadAttention
from tfdist.layers.dense import ColumnParallelDense, RowParallelDense
from tfdist.layers.dropout import Dropout
from tfdist.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from tfdist.layers.feed_forward import ParallelMLP
from tfdist.layers.losses import VocabParallelCrossEntropy
from tfdist.layers.normalization import LayerNormalization, RMSNormalization
from tfdist.layers.positions import PositionEmbedding
from tfdist.layers.sharded_embedding import FeatureConfig, ShardedEmbedding, TableConfig
from tfdist.models.transformer import TransformerDecoderBlock

__all__ = [
    "ColumnParallelDense",
    "Dropout",
    "FeatureConfig",
    "LayerNormalization",
    "MixtureOfExperts",
    "ParallelMLP",
    "ParallelMultiHeadAttention",
    "PositionEmbedding",
    "RowParallelDense",
    "RMSNormalization",
    "ShardedEmbedding",
    "TableConfig",
    "TransformerDecoderBlock",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "blockwise_attention",
]
