"""Keras layers that split themselves over the tensor axis of the strategy in scope; losses of a whole batch.

If the tensor axis has one rank, or without a strategy, each layer equals the corresponding Keras layer.
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

_NAMES = {
    "tfdist.context_parallel.blockwise": ("blockwise_attention",),
    "tfdist.layers.attention": ("ParallelMultiHeadAttention",),
    "tfdist.layers.dense": ("ColumnParallelDense", "RowParallelDense"),
    "tfdist.layers.dropout": ("Dropout",),
    "tfdist.layers.embedding": ("VocabParallelEmbedding", "VocabParallelHead"),
    "tfdist.layers.feed_forward": ("ParallelMLP",),
    "tfdist.layers.losses": ("VocabParallelCrossEntropy",),
    "tfdist.layers.normalization": ("LayerNormalization", "RMSNormalization"),
    "tfdist.layers.positions": ("PositionEmbedding",),
    "tfdist.layers.whole_batch": ("mean_of_rows", "over_batch", "set_aggregation"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
