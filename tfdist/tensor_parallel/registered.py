"""Layers of users' classes, split by the `LayerSplit` that is registered for the class."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from tfdist.backend.keras.attributes import sublayers
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group
from tfdist.sharding.layout import layout_of
from tfdist.sharding.split import (
    LayerSplit,
    Split,
    registered_class,
    split_of,
)
from tfdist.tensor_parallel.adapters import Adapter, computes_as, local_attributes, override
from tfdist.tensor_parallel.attributes import own_trainable, variables_of_layer
from tfdist.utils import checks


class RegisteredAdapter(Adapter):
    """A layer and the layers inside it, split by the registered split of its class."""

    split: LayerSplit

    def __init__(self, layer: keras.layers.Layer, kind: str):
        stock, split = registered_class(layer), split_of(layer)
        if stock is None or split is None:
            raise ValueError(
                f"A split must be registered for the class of `{layer.path}`. Received: a "
                f"{type(layer).__name__}. Register one by `tfdist.extend.register_split`."
            )
        if not computes_as(layer, stock):
            raise ValueError(
                f"A split that is registered for a class cannot be used for a derived class with "
                f"another `call`. Received: `{layer.path}` of class {type(layer).__name__}, with "
                f"the split of {stock.__name__}. Register one for {type(layer).__name__} too; it "
                "may be the same."
            )
        self.stock, self.split = stock, split  # type: ignore[misc]
        self.kinds = tuple(split.kinds)  # type: ignore[misc]
        super().__init__(layer, kind)

    @staticmethod
    def main(layer) -> list:
        """All weights: a plan may use any of them for the layer."""
        return list(_weights_by_path(layer).values())

    def describe(self) -> None:
        """Reads the rules of the split, which must cover all weights."""
        weights = _weights_by_path(self.layer)
        self._rules = self._checked(self.split.weights(self.layer, self.kind), weights)
        self._weights = weights
        self.parts, self.partial = [], []
        for path, rule in self._rules.items():
            variable = weights[path]
            if isinstance(rule, Split):
                # Divisibility is checked by `check`, with the multiple.
                self.parts.append(self._part(variable, _dim(rule, variable), None))
            elif rule == "partial":
                self.partial.append(variable)

    def _checked(self, rules, weights: Mapping[str, keras.Variable]) -> Mapping[str, Any]:
        says = f"`weights` of {type(self.split).__name__}"
        given = f"for `{self.layer.path}` and {self.kind!r}"
        if not isinstance(rules, Mapping):
            raise TypeError(
                f"{says} must return a dict from paths to Split, 'whole' or 'partial'. Received: "
                f"{checks.shown(rules)} {given}. Return a dict such as {{'kernel': Split(1)}}."
            )
        for path, rule in rules.items():
            if not (
                isinstance(rule, Split) or (isinstance(rule, str) and rule in ("whole", "partial"))
            ):
                raise TypeError(
                    f"{says} must return Split, 'whole' or 'partial' for each path. Received: "
                    f"{checks.shown(rule)} for {path!r}, {given}. Return one of them, such as Split(0)."
                )
            if path not in weights:
                raise ValueError(
                    f"{says} must name weights that the layer has. Received: {path!r} {given}. Use "
                    f"their paths in the layer: {', '.join(map(repr, weights))}."
                )
            dims = len(weights[path].shape)
            if isinstance(rule, Split) and not -dims <= rule.dim < dims:
                raise ValueError(
                    f"{says} must name a dim that the weight has. Received: {rule} for {path!r} of "
                    f"shape {tuple(weights[path].shape)}, {given}. Use a dim below {dims}."
                )
        trained = {id(v) for part in all_layers(self.layer) for v in own_trainable(part)}
        missing = [p for p, v in weights.items() if id(v) in trained and p not in rules]
        if missing:
            raise ValueError(
                f"{says} must name every trainable weight of the layer. Received: nothing for "
                f"{', '.join(map(repr, missing))} {given}. Return Split(dim), 'whole' or 'partial' "
                "for each."
            )
        return rules

    def check(self, group: Group) -> None:
        """Checks that dims are divisible by the size of the group times the multiple of the split.

        Raises:
            ValueError: One is not.
        """
        for path, rule in self._rules.items():
            if not isinstance(rule, Split):
                continue
            variable = self._weights[path]
            dim = _dim(rule, variable)
            if variable.shape[dim] % (group.size * rule.multiple_of):
                times = f" times multiple_of={rule.multiple_of}" if rule.multiple_of > 1 else ""
                raise ValueError(
                    f"Dim {dim} of a weight that is split must be divisible by the size of the "
                    f"tensor axis{times}. Received: `{variable.path}` of shape "
                    f"{tuple(variable.shape)} with tensor={group.size}. Use a smaller tensor axis, "
                    "or a plan that replicates this layer."
                )

    def check_compared(self) -> None:
        """Checks that no weight that is "whole" has partial gradients.

        Raises:
            ValueError: One has. Without a comparison, such gradients would be wrong.
        """
        for path, rule in self._rules.items():
            variable = self._weights[path]
            if rule == "whole" and layout_of(variable).partial_over is not None:
                raise ValueError(
                    "The gradient of a whole weight must be the same on every rank. Received: "
                    f"ranks that each compute a part of that of `{variable.path}`. Return 'partial' "
                    f"for {path!r} in `weights` of {type(self.split).__name__}."
                )

    def apply(self, group: Group) -> None:
        """Splits the variables, and overrides the layer's computation."""
        layer = self.layer
        output_dim = self.split.output_dim(layer, self.kind)
        call = self._call(group)
        self._cut(group)
        override(layer, "call", call)
        # Keras' default implementation traces `call`.
        has_own = type(layer).compute_output_shape is not keras.layers.Layer.compute_output_shape
        if output_dim is not None and has_own:
            shape = _divided(layer.compute_output_shape, output_dim, group)
            override(layer, "compute_output_shape", shape)
        for part in all_layers(layer):
            for name in ("enable_lora", "quantize"):
                if hasattr(part, name):
                    override(part, name, _refused(name, part))

    def _call(self, group: Group) -> Callable:
        layer, kind, split, original = self.layer, self.kind, self.split, self.layer.call
        attributes = self._attributes(group)

        @functools.wraps(original)
        def call(*args, **kwargs):
            with contextlib.ExitStack() as stack:
                for thing, values in attributes:
                    stack.enter_context(_with_values(thing, values))
                return split.call(layer, kind, group, original, *args, **kwargs)

        return call

    def _attributes(self, group: Group) -> list[tuple[keras.layers.Layer, dict[str, Any]]]:
        """The layers whose attributes have other values on this rank, with these values."""
        inside = _layers_by_path(self.layer)
        found: dict[str, dict[str, Any]] = {}
        for path, value in self.split.attributes(self.layer, self.kind, group).items():
            where, _, name = path.rpartition("/")
            if where not in inside or not hasattr(inside[where], name):
                raise ValueError(
                    f"`attributes` of {type(self.split).__name__} must name attributes that the layer "
                    f"has. Received: {path!r} for `{self.layer.path}`. Use names such as 'units', or "
                    "paths such as 'gate/units' for layers inside it."
                )
            found.setdefault(where, {})[name] = value
        return [(inside[where], values) for where, values in found.items()]


def parts_of_registered(layers: Iterable[keras.layers.Layer]) -> set[int]:
    """The ids of layers inside those with a registered split, which includes them."""
    return {
        id(part)
        for layer in layers
        if split_of(layer) is not None
        for part in all_layers(layer, include_self=False)
    }


def only_kind(layer) -> str | None:
    """The kind of a registered split that can be used without a plan; None if there is none.

    A layer whose output stays split requires a next layer for it, which a plan must specify.
    """
    split = split_of(layer)
    if split is None or len(split.kinds) != 1:
        return None
    (kind,) = split.kinds
    return kind if split.output_dim(layer, kind) is None else None


def _layers_by_path(layer, path: str = "") -> dict[str, keras.layers.Layer]:
    """A layer, by "", and those inside it, by names."""
    found = {path: layer}
    for part in sublayers(layer):
        for name, inside in _layers_by_path(part, f"{path}/{part.name}".lstrip("/")).items():
            found.setdefault(name, inside)
    return found


def _weights_by_path(layer) -> dict[str, keras.Variable]:
    """The variables of a layer and of those inside it, each once, by path in the layer.

    Raises:
        ValueError: Two have the same path.
    """
    found: dict[str, keras.Variable] = {}
    _add_weights(layer, "", found, set())
    return found


def _add_weights(layer, path: str, found: dict[str, keras.Variable], seen: set[int]) -> None:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    for variable in variables_of_layer(layer):
        if found.setdefault(f"{path}{variable.name}", variable) is not variable:
            raise ValueError(
                "The weights of a layer with a registered split must have different paths in it. "
                f"Received: two of the path {path + variable.name!r}, one of which is "
                f"`{variable.path}`. Give different names to the weights, or to the layers inside."
            )
    for part in sublayers(layer):
        _add_weights(part, f"{path}{part.name}/", found, seen)


@contextlib.contextmanager
def _with_values(layer, values: dict[str, Any]) -> Iterator[None]:
    """`local_attributes`, and properties of the layer's class as well, such as `input_spec`."""
    kind = type(layer)
    properties = {k: v for k, v in values.items() if isinstance(getattr(kind, k, None), property)}
    before = {name: getattr(layer, name) for name in properties}
    with local_attributes(layer, {k: v for k, v in values.items() if k not in properties}):
        try:
            for name, value in properties.items():
                setattr(layer, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(layer, name, value)


def _dim(rule: Split, variable) -> int:
    return rule.dim % len(variable.shape)


def _divided(stock: Callable, dim: int, group: Group) -> Callable:
    """A `compute_output_shape` whose dim `dim` is this rank's share."""

    def share(shape):
        shape = list(shape)
        if shape[dim] is not None:
            shape[dim] //= group.size
        return tuple(shape)

    @functools.wraps(stock)  # Keras inspects the names of its arguments.
    def compute_output_shape(*args, **kwargs):
        return keras.tree.map_shape_structure(share, stock(*args, **kwargs))

    return compute_output_shape


def _refused(name: str, layer) -> Callable:
    """A replacement for a method of Keras' that adds weights that the split does not include."""

    def refuse(*args, **kwargs):
        # Keras' `Model.quantize` skips a layer that raises this error.
        raise NotImplementedError(
            f"`{name}` is not supported for layers that a registered split has split. Received: "
            f"`{layer.path}`. Call it before `parallelize`, with a split whose `weights` name what "
            "it adds."
        )

    return refuse
