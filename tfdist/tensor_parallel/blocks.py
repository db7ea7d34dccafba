"""Blocks of split layers: attention, whose heads are split, and layers that have the same input.

The layers of a block share the input of the part that is split, so the gradient of their input is
summed over the ranks once. An attention layer computes with this rank's number of heads; its
configuration stays global.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfdist.backend.keras.attributes import sublayers
from tfdist.collectives import Group
from tfdist.sharding.layout import layout_of
from tfdist.sharding.weights import sum_gradient_over
from tfdist.tensor_parallel.adapters import (
    Adapter,
    Part,
    SharedInput,
    local_attributes,
    override,
    per_rank_random,
)
from tfdist.tensor_parallel.attributes import own_trainable, variables_of_layer
from tfdist.tensor_parallel.blockwise import use_blockwise
from tfdist.tensor_parallel.quantized import check_mode
from tfdist.tensor_parallel.slicing import split_variable

#: The names of attributes with the projections of an attention layer.
_ROLES = {
    "query": r"_*(query|q)(_dense|_proj|_projector|_projection)?",
    "key": r"_*(key|k)(_dense|_proj|_projector|_projection)?",
    "value": r"_*(value|v)(_dense|_proj|_projector|_projection)?",
    "gate": r"_*gate(_dense|_proj|_projector|_projection)?",
    "output": r"_*(attention_)?(output|out|o)(_dense|_proj|_projector|_projection)?",
}
_PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)
#: Attributes with a number of heads, and with the width of all heads together.
_QUERY_HEADS = re.compile(r"_*num_(query_|attention_)?heads")
_KEY_HEADS = re.compile(r"_*num_key_value_heads")
_GROUPS = re.compile(r"_*(num_key_value_groups|num_repeats)")
_WIDTH = "inner_dim"


def projections(layer) -> dict[str, keras.layers.Layer]:
    """The projections of an attention layer by their roles; empty for other layers."""
    found = {}
    for name, value in vars(layer).items():
        if isinstance(value, _PRODUCTS):
            for role, pattern in _ROLES.items():
                if re.fullmatch(pattern, name):
                    found[role] = value
    return found if {"query", "key", "value", "output"} <= found.keys() else {}


class InsideAdapter(Adapter):
    """A whole projection whose outputs only this rank's heads use.

    Its input enters the part that is split, and each rank computes a part of its gradient.
    """

    kinds = ("inside",)

    def __init__(self, layer: keras.layers.Layer):
        self.stock = next(kind for kind in _PRODUCTS if isinstance(layer, kind))  # type: ignore[misc]
        super().__init__(layer, "inside")

    def describe(self) -> None:
        """All trainable variables are partial."""
        check_mode(self.layer, self.layer.quantization_mode)
        self.partial = [variable for variable in own_trainable(self.layer) if variable.trainable]

    def _call(self, group: Group) -> Callable:
        return self._entering(self.layer.call, group)

    def _quantized_call(self, group: Group) -> Callable:
        return self._entering(self.layer.quantized_call, group)

    def _entering(self, stock: Callable, group: Group) -> Callable:
        def call(inputs, training=None):
            return stock(self.entrance.enter(inputs, group, self.layer.path), training=training)

        return call


class Block:
    """A layer with split layers directly inside it.

    Args:
        layer: The layer.
        adapters: The adapters of layers, by a layer's id.
        parents: The layers that directly contain the layer.
    """

    def __init__(self, layer, adapters: Mapping[int, Adapter], parents: list):
        self.layer = layer
        self._parents = parents
        self.inside: list[InsideAdapter] = []
        self._parts: list[Part] = []
        roles = projections(layer)
        query = adapters.get(id(roles.get("query")))
        self._is_attention = query is not None and query.kind == "column"
        entering = [adapters[id(each)] for each in sublayers(layer) if id(each) in adapters]
        if self._is_attention:
            self._describe_heads(roles, adapters)
            entering += self.inside
        entering = [each for each in entering if each.kind in ("column", "inside")]
        self._shares = len(entering) > 1
        if self._shares:
            for each in entering:
                each.entrance = entering[0].entrance
        self._entrance = entering[0].entrance if entering else SharedInput()

    def _describe_heads(self, roles, adapters: Mapping[int, Adapter]) -> None:
        layer = self.layer
        heads = _named(layer, _QUERY_HEADS)
        key_heads = _named(layer, _KEY_HEADS) or heads
        self._splits_keys = False
        for role, projection in roles.items():
            adapter = adapters.get(id(projection))
            counted = key_heads if role in ("key", "value") else heads
            if adapter is None and role in ("key", "value", "gate"):
                self.inside.append(InsideAdapter(projection))
            elif adapter is not None:
                self._splits_keys |= role == "key"
                adapter.counted = counted and counted.lstrip("_")
                adapter.where = layer.path
                adapter.describe()
        own = vars(layer)
        number = own[heads] if heads else None
        self._cached_heads = own[key_heads] if key_heads and self._splits_keys else None
        for variable in variables_of_layer(layer):
            dims = [dim for dim, size in enumerate(variable.shape) if size == number]
            if dims:  # Such as a bias of relative positions for each head.
                self._parts.append(Part(variable, dims[-1], str(heads).lstrip("_"), layer.path))

    def check(self, group: Group) -> None:
        """Checks that the numbers of heads are divisible by the size of the group.

        Raises:
            ValueError: One is not.
        """
        for part in self._parts:
            part.check(group)

    def apply(self, group: Group) -> None:
        """Splits the layer's own variables, and overrides its call."""
        for part in self._parts:
            split_variable(self.layer, part.variable, part.axis, group)
        for adapter in self.inside:
            adapter.apply(group)
        attributes = self._local_attributes(group) if self._is_attention else {}
        if self._shares or attributes:
            override(self.layer, "call", self._call(attributes, group))
        if self._is_attention:
            self._slice_slopes(group)
            use_blockwise(self.layer)

    def mark_inside(self, group: Group) -> None:
        """Marks weights of heads, and dropout that differs by rank, without a comparison."""
        if not self._is_attention:
            return
        for layer in sublayers(self.layer):
            for variable in own_trainable(layer):
                layout = layout_of(variable)
                if layout.slice is None and not isinstance(layer, _PRODUCTS):
                    sum_gradient_over(variable, group)
            for value in vars(layer).values():
                if isinstance(value, keras.random.SeedGenerator):
                    override(value, "next", per_rank_random(value.next, group))

    def _call(self, attributes: dict[str, Any], group: Group) -> Callable:
        layer, entrance = self.layer, self._entrance
        stock = layer.call
        cached = self._cached_heads if self._is_attention and _takes_cache(stock) else None

        def call(*args, **kwargs):
            if cached is not None and kwargs.get("cache") is not None:
                kwargs["cache"] = _of_own_cache(kwargs["cache"], cached, group)
            with entrance.opened(), local_attributes(layer, attributes):
                return stock(*args, **kwargs)

        return call

    def _local_attributes(self, group: Group) -> dict[str, Any]:
        found = {}
        own = vars(self.layer)
        for name, value in own.items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if (
                _QUERY_HEADS.fullmatch(name)
                or name == _WIDTH
                or (_KEY_HEADS.fullmatch(name) and self._splits_keys)
                or (_GROUPS.fullmatch(name) and not self._splits_keys)
            ):
                found[name] = value // group.size
        if own.get("query_head_dim_normalize") is False:
            # The scale of such attention uses the width of a head, hidden_dim / heads.
            found["hidden_dim"] = own["hidden_dim"] // group.size
        return found

    def _slice_slopes(self, group: Group) -> None:
        """Slices ALiBi's slopes of all heads to this rank's."""
        for owner in (self.layer, *sublayers(self.layer), *self._parents):
            for name, axis in _SLOPES.items():
                if hasattr(owner, name) and name not in vars(owner):
                    override(owner, name, _of_own_heads(getattr(owner, name), axis, group, owner))


#: Methods that return a bias of (number of heads, ...), and its dim of heads.
_SLOPES = {"_get_alibi_bias": 1, "_build_alibi_tensor": 1}


def _of_own_heads(stock: Callable, axis: int, group: Group, owner) -> Callable:
    def bias(num_heads, *args, **kwargs):
        # Layers inside the attention layer are called with this rank's number of heads.
        told_own = _named(owner, _QUERY_HEADS) is None
        every = num_heads * group.size if told_own else num_heads
        share = every // group.size
        index = [slice(None)] * axis + [slice(group.rank * share, (group.rank + 1) * share)]
        return stock(every, *args, **kwargs)[tuple(index)]

    return bias


def _takes_cache(call: Callable) -> bool:
    return "cache" in inspect.signature(call).parameters


def _of_own_cache(cache, heads: int, group: Group):
    """This rank's heads of a cache of keys and values.

    It is one tensor of shape [batch, 2, time, heads, size], or a pair of [batch, time, heads, size].
    A model begins with a cache of zeros for all heads; what attention returns has this rank's.
    """

    def own(part):
        return part[..., : heads // group.size, :] if part.shape[-2] == heads else part

    return keras.tree.map_structure(own, cache)


def _named(layer, pattern: re.Pattern) -> str | None:
    """The first attribute of a layer whose name matches a pattern."""
    return next((name for name in vars(layer) if pattern.fullmatch(name)), None)


def split_blocks(layers: list, adapters: Mapping[int, Adapter]) -> Iterator[Block]:
    """The layers among some that have split layers directly inside them.

    Args:
        layers: All layers of a model.
        adapters: The adapters, by a layer's id.
    """
    parents: dict[int, list] = {}
    for layer in layers:
        for inside in sublayers(layer):
            parents.setdefault(id(inside), []).append(layer)
    for layer in layers:
        if isinstance(layer, keras.Model):
            continue
        if any(id(inside) in adapters for inside in sublayers(layer)):
            yield Block(layer, adapters, parents.get(id(layer), []))
