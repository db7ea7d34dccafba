"""The choice of the adapter for a layer."""

from __future__ import annotations

from tfdist.sharding.split import split_of
from tfdist.tensor_parallel.adapters import Adapter
from tfdist.tensor_parallel.adapters_dense import DenseAdapter, EinsumDenseAdapter
from tfdist.tensor_parallel.adapters_embedding import EmbeddingAdapter, ReversibleEmbeddingAdapter
from tfdist.tensor_parallel.registered import RegisteredAdapter

#: Specific adapters come before general ones.
_ADAPTERS: tuple[type[Adapter], ...] = (
    DenseAdapter,
    EinsumDenseAdapter,
    ReversibleEmbeddingAdapter,
    EmbeddingAdapter,
)


def adapter_class(layer) -> type[Adapter] | None:
    """The class of the adapter for a layer; None if there is none.

    A registered split has precedence over built-in ones.
    """
    if split_of(layer) is not None:
        return RegisteredAdapter
    return next((each for each in _ADAPTERS if isinstance(layer, each.stock)), None)
