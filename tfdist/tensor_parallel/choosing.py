"""Which adapter splits a layer."""

from __future__ import annotations

from tfdist.sharding.split import split_of
from tfdist.tensor_parallel.adapters import Adapter
from tfdist.tensor_parallel.adapters_dense import DenseAdapter, EinsumDenseAdapter
from tfdist.tensor_parallel.adapters_embedding import EmbeddingAdapter, ReversibleEmbeddingAdapter
from tfdist.tensor_parallel.registered import RegisteredAdapter

#: The more special before the more general.
_ADAPTERS: tuple[type[Adapter], ...] = (
    DenseAdapter,
    EinsumDenseAdapter,
    ReversibleEmbeddingAdapter,
    EmbeddingAdapter,
)


def adapter_class(layer) -> type[Adapter] | None:
    """The kind of adapter for a layer; None where there is none.

    What is registered for a class comes before what is built in.
    """
    if split_of(layer) is not None:
        return RegisteredAdapter
    return next((each for each in _ADAPTERS if isinstance(layer, each.stock)), None)
