"""Stock Keras layers, split over the tensor axis in place.

A layer keeps its identity, its class and its configuration, so a graph, a subclassed model and a
file see the layer that they know. What changes is what the instance holds and does: its variables
become this rank's slices, and `call` is overridden on the instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import keras
import tensorflow as tf
from keras import ops

from tfdist.collectives import Group
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    copy_to_tensor_region,
    gather_from_tensor_region,
    reduce_from_tensor_region,
)
from tfdist.keras_internals.attributes import kernel_of
from tfdist.layers.embedding import stays_split
from tfdist.sharding.weights import check_by_entries, split_variable, value_tensor

__all__ = [
    "Adapter",
    "DenseAdapter",
    "EinsumDenseAdapter",
    "Part",
    "columns",
    "override",
    "same_dtype",
]


def override(thing, name: str, value) -> None:
    """Overrides a method or an attribute of one object, past what Keras does at assignments."""
    vars(thing)[name] = value


@dataclasses.dataclass
class Part:
    """A variable of a layer, and how it is split.

    Attributes:
        variable: The variable.
        axis: The dim that is split.
        what: What that dim counts, for messages; None where it may be padded.
        where: The path of the layer that the user knows it by.
    """

    variable: keras.Variable
    axis: int
    what: str | None
    where: str


class Adapter:
    """How one layer is split.

    Attributes:
        layer: The layer.
        kind: What the plan says of it.
        parts: The variables that are split; its others stay whole.
    """

    stock: ClassVar[type]
    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, layer: keras.layers.Layer, kind: str):
        name = type(layer).__name__
        if kind not in self.kinds:
            raise ValueError(
                f"Of layers of class {name} a plan says "
                f"{' or '.join(map(repr, (*self.kinds, 'replicate')))}. Received: {kind!r} for "
                f"`{layer.path}`."
            )
        if type(layer).call is not self.stock.call:  # type: ignore[attr-defined]
            raise ValueError(
                f"What `{name}` computes with its weights is its own, so it cannot be split. "
                f"Received: {kind!r} for `{layer.path}`. Split the layers inside it, or say "
                "'replicate'."
            )
        self.layer = layer
        self.kind = kind
        self.parts = self._parts()
        for part in self.parts:
            variable = part.variable
            check_by_entries(layer, variable.name, variable.regularizer, variable.constraint)

    @staticmethod
    def main(layer) -> list:
        """The variables by which a plan says what becomes of the layer."""
        raise NotImplementedError

    def check(self, group: Group) -> None:
        """Raises where a dim does not divide by the group.

        Raises:
            ValueError: It does not.
        """
        for part in self.parts:
            size = part.variable.shape[part.axis]
            if part.what is not None and size % group.size:
                raise ValueError(
                    f"{part.what} divides by the tensor axis. Received: {part.what}={size} in "
                    f"`{part.where}` with tensor={group.size}."
                )

    def apply(self, group: Group) -> None:
        """Cuts the variables, and overrides what the layer computes."""
        for part in self.parts:
            split_variable(self.layer, part.variable, part.axis, group)
        override(self.layer, "call", self._call(group))

    def _parts(self) -> list[Part]:
        raise NotImplementedError

    def _call(self, group: Group) -> Callable:
        raise NotImplementedError

    def _part(self, variable, axis: int, what: str | None) -> Part:
        return Part(variable, axis, what, self.layer.path)


class DenseAdapter(Adapter):
    """Y = X W + b.

    By columns a rank computes its share of Y's last dim from the whole of X. By rows it takes its
    share of X's last dim, and the ranks' products are summed. As a vocabulary it computes its
    columns, and the shares are joined.
    """

    stock = keras.layers.Dense
    kinds = ("column", "row", "vocabulary")

    @staticmethod
    def main(layer) -> list:
        """The kernel."""
        return [kernel_of(layer)]

    def _parts(self) -> list[Part]:
        layer = self.layer
        if self.kind == "row":
            return [self._part(kernel_of(layer), 0, "The size of the input")]
        _refuse_whole_activation(layer, self.kind)
        what = "units" if self.kind == "column" else None
        parts = [self._part(kernel_of(layer), 1, what)]
        if layer.bias is not None:
            parts.append(self._part(layer.bias, 0, what))
        return parts

    def apply(self, group: Group) -> None:
        """Cuts the variables, and overrides what the layer computes."""
        super().apply(group)
        layer = self.layer
        if self.kind == "row":
            # The layer itself says what is wrong with another input, in words of the plan.
            layer.input_spec = keras.layers.InputSpec(min_ndim=2)
        if self.kind == "column":
            override(layer, "compute_output_shape", _divided(layer.compute_output_shape, -1, group))

    def _call(self, group: Group) -> Callable:
        layer, name = self.layer, self.layer.path

        def column(inputs, training=None):
            return _finish(layer, columns(inputs, value_tensor(kernel_of(layer)), group, name))

        def row(inputs, training=None):
            share = kernel_of(layer).shape[0]
            _check_share(layer, inputs.shape[-1], share, group)
            product = tf.convert_to_tensor(ops.matmul(inputs, kernel_of(layer)))
            return _finish(layer, reduce_from_tensor_region(product, group, name=name))

        def vocabulary(inputs, training=None):
            outputs = columns(inputs, value_tensor(kernel_of(layer)), group, name)
            if layer.bias is not None:
                outputs = ops.add(outputs, layer.bias)
            plain = layer.activation in (None, keras.activations.linear)
            if plain and stays_split(layer):
                return outputs
            outputs = gather_from_tensor_region(outputs, group, name=name)[..., : layer.units]
            return outputs if plain else layer.activation(outputs)

        return {"column": column, "row": row, "vocabulary": vocabulary}[self.kind]


class EinsumDenseAdapter(Adapter):
    """Y = einsum(X, W) + b, as the projections of attention.

    By columns the first dim of the kernel is split that Y has and X has not; by rows the first
    that X has and Y has not. For attention both are the heads.

    Attributes:
        enters: Whether the input's gradient is summed here, or where several layers take it.
    """

    stock = keras.layers.EinsumDense
    kinds = ("column", "row")

    def __init__(self, layer: keras.layers.Layer, kind: str):
        self.enters = True
        super().__init__(layer, kind)

    @staticmethod
    def main(layer) -> list:
        """The kernel."""
        return [kernel_of(layer)]

    def _parts(self) -> list[Part]:
        layer = self.layer
        inputs, kernel, outputs = _terms(layer.equation)
        there, elsewhere = (outputs, inputs) if self.kind == "column" else (inputs, outputs)
        labels = [label for label in kernel if label in there and label not in elsewhere]
        if not labels:
            side = "output" if self.kind == "column" else "input"
            raise ValueError(
                f"A kernel is split {self.kind}-wise along a dim that only its layer's {side} "
                f"has. Received: the equation {layer.equation!r} of `{layer.path}`."
            )
        self.label = labels[0]
        axis = kernel.index(self.label)
        what = f"Dim {axis} of the kernel"
        parts = [self._part(kernel_of(layer), axis, what)]
        if self.kind == "column":
            _refuse_whole_activation(layer, self.kind)
            if layer.bias is not None and self.label in layer.bias_axes:
                # A bias has the output's dims from the first that it is named for.
                names = outputs.replace("...", "")
                first = min(names.index(label) for label in layer.bias_axes)
                parts.append(self._part(layer.bias, names.index(self.label) - first, what))
        return parts

    def apply(self, group: Group) -> None:
        """Cuts the variables, and overrides what the layer computes."""
        super().apply(group)
        if self.kind == "column":
            axis = _position(_terms(self.layer.equation)[2], self.label)
            shape = _divided(self.layer.compute_output_shape, axis, group)
            override(self.layer, "compute_output_shape", shape)

    def _call(self, group: Group) -> Callable:
        layer, name = self.layer, self.layer.path
        stock = layer.call
        inputs_term, kernel_term, _ = _terms(layer.equation)

        def column(inputs, training=None):
            entered = copy_to_tensor_region(inputs, group, name=name) if self.enters else inputs
            return stock(entered, training=training)

        def row(inputs, training=None):
            share = kernel_of(layer).shape[kernel_term.index(self.label)]
            _check_share(layer, inputs.shape[_position(inputs_term, self.label)], share, group)
            product = tf.convert_to_tensor(ops.einsum(layer.equation, inputs, kernel_of(layer)))
            return _finish(layer, reduce_from_tensor_region(product, group, name=name))

        return column if self.kind == "column" else row


def columns(inputs, kernel, group: Group, name: str):
    """`ops.matmul(inputs, kernel)` with this rank's columns, in the dtype that Keras takes."""
    inputs, kernel = same_dtype(inputs, kernel)
    return column_parallel_matmul(inputs, kernel, group, name=name)


def same_dtype(inputs, kernel) -> tuple:
    """Both in the dtype that Keras multiplies them in."""
    dtype = keras.backend.result_type(inputs.dtype, kernel.dtype)
    return tf.cast(inputs, dtype), tf.cast(kernel, dtype)


def _finish(layer, outputs):
    """Bias and activation, as `Dense` and `EinsumDense` have them."""
    if layer.bias is not None:
        outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _check_share(layer, size: int | None, share: int, group: Group) -> None:
    if size is not None and size != share:
        raise ValueError(
            f"`{layer.path}` is split by rows: of its {share * group.size} inputs a rank takes the "
            f"{share} that a 'column' layer before it leaves to the rank. Received: {size}. Say "
            "'column' of the layer that feeds it."
        )


def _refuse_whole_activation(layer, kind: str) -> None:
    whole = (keras.activations.softmax, keras.activations.log_softmax)
    if kind == "column" and layer.activation in whole:
        raise ValueError(
            f"`{layer.activation.__name__}` looks at all units, of which a rank has a part. "
            f"Received: 'column' for `{layer.path}`; 'vocabulary' joins the units first."
        )


def _divided(stock: Callable, axis: int, group: Group) -> Callable:
    """A `compute_output_shape` whose dim `axis` is this rank's share."""

    def compute_output_shape(input_shape):
        shape = list(stock(input_shape))
        shape[axis] //= group.size
        return tuple(shape)

    return compute_output_shape


def _terms(equation: str) -> tuple[str, str, str]:
    """The labels of inputs, kernel and outputs."""
    left, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs


def _position(term: str, label: str) -> int:
    """Where a label stands, counted from the end that no ellipsis stands at."""
    if term.endswith("..."):
        return term.index(label)
    return term.index(label) - len(term)
