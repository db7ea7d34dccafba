"""Stock Dense and EinsumDense layers, split by columns or by rows in place."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from tfdist.backend.keras.attributes import kernel_of
from tfdist.collectives import Group
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    gather_from_region,
    reduce_from_region,
)
from tfdist.layers.embedding import keeps_vocab_split
from tfdist.sharding.weights import value_tensor
from tfdist.tensor_parallel.adapters import Adapter, LayerView, override
from tfdist.tensor_parallel.equations import equation_of_a, position, terms
from tfdist.tensor_parallel.lora import add_lora, lora_axes
from tfdist.tensor_parallel.one_pass import activation_of
from tfdist.tensor_parallel.prefill import dropped_logits, drops_logits
from tfdist.tensor_parallel.products import einsum, matmul, same_dtype
from tfdist.tensor_parallel.quantized import (
    quantized_axes,
    quantized_row_attributes,
    quantized_sizes,
)


class _ProductAdapter(Adapter):
    """The common base for Dense and EinsumDense: a kernel, optionally quantized or with LoRA."""

    #: The dim of the kernel that is split, among those that it has before quantization.
    kernel_axis: int
    kernel_dims: int

    @staticmethod
    def main(layer) -> list:
        """The kernel."""
        return [kernel_of(layer)]

    def _describe_product(self, what: str | None) -> None:
        layer, axis = self.layer, self.kernel_axis
        if layer.quantization_mode:
            for variable, dim, counted in quantized_axes(layer, axis):
                self.parts.append(self._part(variable, dim, counted or what))
        else:
            self.parts.append(self._part(kernel_of(layer), axis, what))
        split, self.partial = lora_axes(layer, axis, self.kernel_dims)
        self.parts += [self._part(variable, dim, what) for variable, dim in split]

    def _enter(self, inputs, group: Group):
        return self.entrance.enter(inputs, group, self.layer.path)

    def _quantized_call(self, group: Group) -> Callable:
        layer, name = self.layer, self.layer.path
        stock = type(layer).quantized_call

        def product(inputs, attributes, training):
            return tf.convert_to_tensor(
                stock(LayerView(layer, attributes), inputs, training=training)
            )

        def column(inputs, training=None):
            sizes = quantized_sizes(layer, self.kernel_axis, group)
            return product(self._enter(inputs, group), sizes, training)

        def row(inputs, training=None):
            self._check_share(inputs, group)
            attributes = quantized_row_attributes(layer, self.kernel_axis, group)
            part = product(inputs, attributes, training)
            return _finish(layer, reduce_from_region(part, group, name=name))

        def vocabulary(inputs, training=None):
            sizes = quantized_sizes(layer, self.kernel_axis, group)
            outputs = product(self._enter(inputs, group), {"activation": None, **sizes}, training)
            return self._joined(outputs, group)

        return {"column": column, "row": row, "vocabulary": vocabulary}[self.kind]

    def _check_share(self, inputs, group: Group) -> None:
        raise NotImplementedError

    def _joined(self, outputs, group: Group):
        """The outputs of a vocabulary: of all units, or split if the loss supports that."""
        layer = self.layer
        plain = layer.activation in (None, keras.activations.linear)
        if plain and keeps_vocab_split(layer):
            return outputs
        if drops_logits():
            return dropped_logits(outputs, layer.units)
        outputs = gather_from_region(outputs, group, name=layer.path)[..., : layer.units]
        return outputs if plain else layer.activation(outputs)


class DenseAdapter(_ProductAdapter):
    """Y = X W + b.

    By columns a rank computes its share of Y's last dim from the whole of X. By rows it uses its
    share of X's last dim, and the ranks' products are summed. As a vocabulary it computes its
    columns, and the shares are concatenated.
    """

    stock = keras.layers.Dense
    kinds = ("column", "row", "vocabulary")
    kernel_dims = 2

    def describe(self) -> None:
        """The kernel, the bias of columns, and the variables of LoRA and quantization."""
        layer = self.layer
        self.parts, self.partial = [], []
        if self.kind == "row":
            self.kernel_axis = 0
            self._describe_product(self.counted or "The size of the input")
            return
        _refuse_whole_activation(layer, self.kind)
        self.kernel_axis = 1
        what = self.counted or "units" if self.kind == "column" else None
        self._describe_product(what)
        if layer.bias is not None:
            self.parts.append(self._part(layer.bias, 0, what))

    def apply(self, group: Group) -> None:
        """Splits the variables, and overrides the layer's computation."""
        super().apply(group)
        layer = self.layer
        if self.kind == "row":
            # The layer checks its input itself, with a message in terms of the plan.
            layer.input_spec = keras.layers.InputSpec(min_ndim=2)
        if self.kind == "column":
            override(layer, "compute_output_shape", _divided(layer.compute_output_shape, -1, group))

    def _call(self, group: Group) -> Callable:
        layer, name = self.layer, self.layer.path

        def product(inputs):
            if not layer.lora_enabled and not self.entrance.is_open:
                return columns(inputs, value_tensor(kernel_of(layer)), group, name)
            entered = self._enter(inputs, group)
            outputs = matmul(entered, value_tensor(kernel_of(layer)))
            return add_lora(layer, outputs, lambda a: matmul(entered, a))

        def column(inputs, training=None):
            return _finish(layer, product(inputs))

        def row(inputs, training=None):
            self._check_share(inputs, group)
            outputs = matmul(inputs, value_tensor(kernel_of(layer)))
            outputs = add_lora(layer, outputs, lambda a: matmul(inputs, a))
            return _finish(layer, reduce_from_region(outputs, group, name=name))

        def vocabulary(inputs, training=None):
            outputs = product(inputs)
            return self._joined(
                outputs if layer.bias is None else ops.add(outputs, layer.bias), group
            )

        return {"column": column, "row": row, "vocabulary": vocabulary}[self.kind]

    def _check_share(self, inputs, group: Group) -> None:
        _check_share(self.layer, inputs.shape[-1], kernel_of(self.layer).shape[0], group)


class EinsumDenseAdapter(_ProductAdapter):
    """Y = einsum(X, W) + b, as in the projections of attention.

    By columns the first dim of the kernel is split that Y has and X has not; by rows the first
    that X has and Y has not. For attention both are the heads.
    """

    stock = keras.layers.EinsumDense
    kinds = ("column", "row")

    def describe(self) -> None:
        """The kernel, the bias of columns, and the variables of LoRA and quantization."""
        layer = self.layer
        self.parts, self.partial = [], []
        inputs, kernel, outputs = terms(layer.equation)
        there, elsewhere = (outputs, inputs) if self.kind == "column" else (inputs, outputs)
        labels = [label for label in kernel if label in there and label not in elsewhere]
        if not labels:
            side = "output" if self.kind == "column" else "input"
            raise ValueError(
                f"A {self.kind}-wise split requires a dim of the kernel that only the layer's {side} "
                f"has. Received: the equation {layer.equation!r} of `{layer.path}`."
            )
        self.label = labels[0]
        self.kernel_axis, self.kernel_dims = kernel.index(self.label), len(kernel)
        what = self.counted or f"Dim {self.kernel_axis} of the kernel"
        if self.kind == "column":
            _refuse_whole_activation(layer, self.kind)
        self._describe_product(what)
        if self.kind == "column" and layer.bias is not None and self.label in layer.bias_axes:
            # A bias has the output's dims from its first label on.
            names = outputs.replace("...", "")
            first = min(names.index(label) for label in layer.bias_axes)
            self.parts.append(self._part(layer.bias, names.index(self.label) - first, what))

    def apply(self, group: Group) -> None:
        """Splits the variables, and overrides the layer's computation."""
        super().apply(group)
        if self.kind == "column":
            axis = position(terms(self.layer.equation)[2], self.label)
            shape = _divided(self.layer.compute_output_shape, axis, group)
            override(self.layer, "compute_output_shape", shape)

    def _call(self, group: Group) -> Callable:
        layer, name = self.layer, self.layer.path
        through_a = equation_of_a(layer.equation)

        def product(inputs):
            if through_a is None:
                # A's rank would replace a dim that is summed over, so only the whole kernel works.
                return einsum(layer.equation, inputs, layer.kernel)
            outputs = einsum(layer.equation, inputs, value_tensor(kernel_of(layer)))
            return add_lora(layer, outputs, lambda a: einsum(through_a, inputs, a))

        def column(inputs, training=None):
            return _finish(layer, product(self._enter(inputs, group)))

        def row(inputs, training=None):
            self._check_share(inputs, group)
            return _finish(layer, reduce_from_region(product(inputs), group, name=name))

        return column if self.kind == "column" else row

    def _check_share(self, inputs, group: Group) -> None:
        part = self.parts[0]
        if self.layer.quantization_mode == "int4":
            return  # A packed kernel has other dims; the product itself reports a mismatch.
        share = part.variable.shape[self.kernel_axis]
        size = inputs.shape[position(terms(self.layer.equation)[0], self.label)]
        _check_share(self.layer, size, share, group)


def columns(inputs, kernel, group: Group, name: str):
    """`ops.matmul(inputs, kernel)` with this rank's columns, in the dtype of Keras."""
    inputs, kernel = same_dtype(inputs, kernel)
    return column_parallel_matmul(inputs, kernel, group, name=name)


def _finish(layer, outputs):
    """Adds the bias and applies the activation, as `Dense` and `EinsumDense` do."""
    if layer.bias is not None:
        outputs = ops.add(outputs, layer.bias)
    activation = activation_of(layer)
    return outputs if activation is None else activation(outputs)


def _check_share(layer, size: int | None, share: int, group: Group) -> None:
    if size is not None and size != share:
        raise ValueError(
            f"`{layer.path}` is split by rows, so it requires an input of {share} units on each rank, of "
            f"{share * group.size} in all. Received: {size}. Use 'column' for the layer before it."
        )


def _refuse_whole_activation(layer, kind: str) -> None:
    whole = (keras.activations.softmax, keras.activations.log_softmax)
    if kind == "column" and layer.activation in whole:
        raise ValueError(
            f"`{layer.activation.__name__}` requires all units, but a rank has only a part of them. "
            f"Received: 'column' for `{layer.path}`. Use 'vocabulary', which joins the units first."
        )


def _divided(stock: Callable, axis: int, group: Group) -> Callable:
    """A `compute_output_shape` whose dim `axis` is this rank's share."""

    def compute_output_shape(input_shape):
        shape = list(stock(input_shape))
        shape[axis] //= group.size
        return tuple(shape)

    return compute_output_shape
