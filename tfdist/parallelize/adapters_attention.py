"""Stock attention layers, whose projections are split by heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras

from tfdist.collectives import Group
from tfdist.collectives.mappings import copy_to_tensor_region
from tfdist.keras_internals.attributes import projections
from tfdist.keras_internals.private import get_keras_mask, set_keras_mask
from tfdist.parallelize.adapters import Adapter, EinsumDenseAdapter, override

__all__ = ["join_attention"]


def join_attention(attention, adapters: Mapping[int, Adapter]) -> Callable[[Group], None] | None:
    """Tells the projections of an attention layer that they belong together.

    Where all that take its inputs are split by columns, the inputs' gradients are summed once for
    all of them.

    Args:
        attention: Any layer.
        adapters: By a layer's id, how it is split.

    Returns:
        What overrides the layer, for a group; None for other layers and where nothing is joined.
    """
    kinds = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    if not isinstance(attention, kinds):
        return None
    grouped = isinstance(attention, keras.layers.GroupQueryAttention)
    heads = "num_query_heads" if grouped else "num_heads"
    key_heads = "num_key_value_heads" if grouped else "num_heads"
    entered_by: list[EinsumDenseAdapter] = []
    together = True
    for name, projection in projections.items():
        layer = projection(attention, None)
        adapter = adapters.get(id(layer))
        for part in adapter.parts if adapter is not None else ():
            part.what = key_heads if name in ("key", "value") else heads
            part.where = attention.path
        if layer is None or name == "output":
            continue
        if isinstance(adapter, EinsumDenseAdapter) and adapter.kind == "column":
            entered_by.append(adapter)
        else:
            together = False
    if not together:
        return None

    def join(group: Group) -> None:
        for adapter in entered_by:
            adapter.enters = False
        override(attention, "call", _entering_once(attention, group))

    return join


def _entering_once(attention, group: Group) -> Callable:
    stock = attention.call

    def call(query, value, key=None, *args, **kwargs):
        entered: dict[int, tuple] = {}
        for tensor in (query, value, key):
            if tensor is not None and id(tensor) not in entered:
                inside = copy_to_tensor_region(tensor, group, name=attention.path)
                set_keras_mask(inside, get_keras_mask(tensor))
                entered[id(tensor)] = (tensor, inside)
        inputs = (entered.get(id(tensor), (None, None))[1] for tensor in (query, value, key))
        outputs = stock(*inputs, *args, **kwargs)
        # Stock attention takes the masks off its inputs, which others may look at later.
        for tensor, inside in entered.values():
            set_keras_mask(tensor, get_keras_mask(inside))
        return outputs

    return call
