"""Stock Keras layers, split over the tensor axis in place.

A layer keeps its identity, its class and its configuration, so graphs, subclassed models and files
still refer to the same layer. Only its state and computation change: its variables become this
rank's slices, and `call` is overridden on the instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import is_deferred
from tfdist.collectives import Group, broadcast
from tfdist.collectives.mappings import copy_to_region
from tfdist.layers.dropout import own_seed
from tfdist.sharding.weights import check_by_entries, sum_gradient_over
from tfdist.tensor_parallel.attributes import variables_of_layer
from tfdist.tensor_parallel.quantized import check_mode
from tfdist.tensor_parallel.slicing import split_variable, unslice_variable
from tfdist.utils import checks


def per_rank_random(draw: Callable, group: Group) -> Callable:
    """A seed generator's `next`, replaced by one whose seeds differ within the group."""
    return lambda ordered=True: own_seed(draw(ordered), group)


def override(thing, name: str, value) -> None:
    """Overrides a method or an attribute of one object, bypassing Keras' tracking of assignments."""
    vars(thing)[name] = value


@contextlib.contextmanager
def local_attributes(thing, attributes: dict[str, Any]) -> Iterator[None]:
    """Sets attributes of an object to this rank's values in its context; its configuration stays global."""
    own = vars(thing)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


class LayerView:
    """A layer with other values of some attributes, on which Keras' methods can be called.

    Functions that such a method returns for the backward pass use these values too.

    Args:
        layer: The layer.
        attributes: The other values.
    """

    def __init__(self, layer: keras.layers.Layer, attributes: Mapping[str, Any]):
        self._layer = layer
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        method = inspect.getattr_static(type(self._layer), name, None)
        if inspect.isfunction(method):
            return types.MethodType(method, self)
        return getattr(self._layer, name)


@dataclasses.dataclass
class Part:
    """A variable of a layer, and how it is split.

    Attributes:
        variable: The variable.
        axis: The dim that is split.
        what: The name of the size of that dim, for messages; None if it may be padded.
        where: The path of the layer that the user specified.
    """

    variable: keras.Variable
    axis: int
    what: str | None
    where: str

    def check(self, group: Group) -> None:
        """Checks that the dim is divisible by the size of the group.

        Raises:
            ValueError: It is not.
        """
        size = self.variable.shape[self.axis]
        if self.what is not None and size % group.size:
            received = f"{self.what}={size}" if self.what.isidentifier() else f"{size}"
            raise ValueError(
                f"{self.what} must be divisible by the size of the tensor axis. Received: {received} in "
                f"`{self.where}` with tensor={group.size}. Use a smaller tensor axis, or a plan that "
                "replicates this layer."
            )


class SharedInput:
    """The input of the split part of a model, shared by all layers that have the same input.

    The gradients of a tensor that several layers of a block use, such as query, key and value, are
    then summed over the ranks in one collective.
    """

    def __init__(self) -> None:
        self._entered: dict[Any, tuple] | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Shares each tensor that enters in its context."""
        before, self._entered = self._entered, {}
        try:
            yield
        finally:
            self._entered = before

    @property
    def is_open(self) -> bool:
        """Whether several layers share their inputs."""
        return self._entered is not None

    def enter(self, tensor, group: Group, name: str):
        """`copy_to_region`, or its earlier result for this tensor."""
        if self._entered is None:
            return copy_to_region(tensor, group, name=name)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        key = id(tensor), id(graph)
        if key not in self._entered:
            inside = copy_to_region(tensor, group, name=name)
            self._entered[key] = (tensor, inside)
        return self._entered[key][1]


def computes_as(layer: keras.layers.Layer, stock: Any) -> bool:
    """Whether a layer computes the same function as a class of Keras."""
    return type(layer).call is stock.call


class Adapter:
    """The split of one layer.

    Attributes:
        layer: The layer.
        kind: The kind that the plan has for it.
        parts: The variables that are split; its others stay whole.
        partial: Whole variables of which each rank computes a part of the gradient.
        entrance: The input of the layer; the layers of a block share one.
        counted: The name of the size of the split dims, if the layer's block has one, as "num_heads".
        where: The path of the layer that the user specified.
    """

    stock: ClassVar[type]
    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, layer: keras.layers.Layer, kind: str):
        name = type(layer).__name__
        if kind not in self.kinds:
            raise ValueError(
                f"A plan for layers of class {name} must use "
                f"{' or '.join(map(repr, (*self.kinds, 'replicate')))}. Received: {kind!r} for "
                f"`{layer.path}`."
            )
        if not computes_as(layer, self.stock):
            raise ValueError(
                f"`{name}` has its own `call`, so it cannot be split as {self.stock.__name__}. "
                f"Received: {kind!r} for `{layer.path}`. Split the layers inside it, or use "
                "'replicate'."
            )
        self.layer = layer
        self.kind = kind
        self.entrance = SharedInput()
        self.counted: str | None = None
        self.where = layer.path
        self.parts: list[Part] = []
        self.partial: list[keras.Variable] = []
        self.describe()
        for part in self.parts:
            variable = part.variable
            check_by_entries(layer, variable.name, variable.regularizer, variable.constraint)

    @staticmethod
    def main(layer) -> list:
        """The variables for which a plan specifies the kind of the layer."""
        raise NotImplementedError

    def describe(self) -> None:
        """Determines the split of the layer's current variables: sets `parts` and `partial`.

        Raises:
            ValueError: A variable cannot be split.
        """
        raise NotImplementedError

    def check(self, group: Group) -> None:
        """Checks that the split dims are divisible by the size of the group.

        Raises:
            ValueError: One is not.
        """
        for part in self.parts:
            part.check(group)

    def check_compared(self) -> None:
        """Checks the results of the comparison with the whole model against those of the adapter.

        Raises:
            ValueError: They contradict each other.
        """

    def apply(self, group: Group) -> None:
        """Splits the variables, and overrides the layer's computation."""
        self._cut(group)
        override(self.layer, "call", self._call(group))
        override(self.layer, "quantized_call", self._quantized_call(group))
        enable_lora = self._on_the_whole(self.layer.enable_lora, group)
        override(self.layer, "enable_lora", self._checking_the_rank(enable_lora))
        quantize = self._on_the_whole(self.layer.quantize, group)
        override(self.layer, "quantize", self._checking_the_mode(quantize))

    def _cut(self, group: Group) -> None:
        for part in self.parts:
            split_variable(self.layer, part.variable, part.axis, group)
        for variable in self.partial:
            sum_gradient_over(variable, group)

    def _on_the_whole(self, method: Callable, group: Group) -> Callable:
        """A method of Keras' that creates variables from whole ones; every rank must call it."""

        def call(*args, **kwargs):
            known = {id(variable) for variable in variables_of_layer(self.layer)}
            for part in self.parts:
                unslice_variable(part.variable)
            for variable in self.partial:
                sum_gradient_over(variable, None)
            try:
                return method(*args, **kwargs)
            finally:
                for variable in variables_of_layer(self.layer):
                    if id(variable) not in known and not is_deferred(variable):
                        # Ranks may have drawn different values.
                        variable.assign(broadcast(variable.value, group, name="parallelize/values"))
                self.describe()
                self.check(group)
                self._cut(group)

        return call

    def _checking_the_rank(self, stock: Callable) -> Callable:
        """Checks the arguments before anything has changed."""

        def enable_lora(rank, *args, **kwargs):
            rank = checks.integer("rank", rank, minimum=1)
            if self.layer.lora_enabled:
                raise ValueError(
                    f"A layer cannot get LoRA twice. Received: rank={rank} for `{self.layer.path}`, which "
                    f"has LoRA of rank {self.layer.lora_rank}. Create the model again for another rank."
                )
            return stock(rank, *args, **kwargs)

        return enable_lora

    def _checking_the_mode(self, stock: Callable) -> Callable:
        """Checks the arguments before anything has changed."""

        def quantize(mode=None, *args, **kwargs):
            check_mode(self.layer, mode or getattr(kwargs.get("config"), "mode", None))
            return stock(mode, *args, **kwargs)

        return quantize

    def _call(self, group: Group) -> Callable:
        raise NotImplementedError

    def _quantized_call(self, group: Group) -> Callable:
        raise NotImplementedError

    def _part(self, variable, axis: int, what: str | None) -> Part:
        return Part(variable, axis, what, self.where)
