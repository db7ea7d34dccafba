"""Keras layers that split themselves over the tensor axis of the strategy in scope; losses of a whole batch.

Where the tensor axis is one rank or there is no strategy, each layer is its ordinary Keras self.
"""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.context_parallel.blockwise import blockwise_attention as blockwise_attention
    from tfdist.layers.attention import ParallelMultiHeadAttention as ParallelMultiHeadAttention
    from tfdist.layers.dense import ColumnParallelDense as ColumnParallelDense
    from tfdist.layers.dense import RowParallelDense as RowParallelDense
    from tfdist.layers.dropout import Dropout as Dropout
    from tfdist.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tfdist.layers.embedding import VocabParallelHead as VocabParallelHead
    from tfdist.layers.feed_forward import ParallelMLP as ParallelMLP
    from tfdist.layers.losses import VocabParallelCrossEntropy as VocabParallelCrossEntropy
    from tfdist.layers.normalization import LayerNormalization as LayerNormalization
    from tfdist.layers.normalization import RMSNormalization as RMSNormalization
    from tfdist.layers.positions import PositionEmbedding as PositionEmbedding
    from tfdist.layers.whole_batch import mean_of_rows as mean_of_rows
    from tfdist.layers.whole_batch import over_batch as over_batch
    from tfdist.layers.whole_batch import set_aggregation as set_aggregation

_HOMES = {
    "ColumnParallelDense": "tfdist.layers.dense",
    "RowParallelDense": "tfdist.layers.dense",
    "Dropout": "tfdist.layers.dropout",
    "LayerNormalization": "tfdist.layers.normalization",
    "RMSNormalization": "tfdist.layers.normalization",
    "ParallelMLP": "tfdist.layers.feed_forward",
    "ParallelMultiHeadAttention": "tfdist.layers.attention",
    "PositionEmbedding": "tfdist.layers.positions",
    "VocabParallelCrossEntropy": "tfdist.layers.losses",
    "VocabParallelEmbedding": "tfdist.layers.embedding",
    "VocabParallelHead": "tfdist.layers.embedding",
    "mean_of_rows": "tfdist.layers.whole_batch",
    "over_batch": "tfdist.layers.whole_batch",
    "set_aggregation": "tfdist.layers.whole_batch",
    "blockwise_attention": "tfdist.context_parallel.blockwise",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
