"""Quantized layers that are split: the dims of their variables, and the scale of a row's inputs.

int8: a kernel of one byte an entry with a scale for each output; inputs are quantized by their
largest entry. int4: two entries in a byte, packed along the outputs; with blocks each run of
`block_size` inputs has a scale and a zero point for each output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.backend.keras.attributes import kernel_of
from tfdist.collectives import Group, all_reduce
from tfdist.tensor_parallel.attributes import (
    adjust_scale,
    int4_block_size,
    int4_columns,
    int4_inputs,
    int4_outputs,
    quantization_axes,
)
from tfdist.tensor_parallel.equations import terms

_MODES = ("int8", "int4")


def check_mode(layer, mode: str | None) -> None:
    """Checks that a quantization mode is supported for a layer that is split.

    Args:
        layer: The layer.
        mode: Keras' name of the mode; None for a layer that is not quantized.

    Raises:
        ValueError: It is neither int8 nor int4, or int4 in a version of Keras that packs by inputs, or
            Keras quantizes in another way, as 3.16 does.
    """
    if mode is not None and not adjust_scale.is_known:
        raise ValueError(
            f"Splitting a quantized layer requires Keras before 3.16. Received: `{layer.path}` with Keras "
            f"{keras.__version__}. Use 'replicate' for it."
        )
    if mode == "int4" and not int4_outputs.is_known:
        raise ValueError(
            "Splitting an int4 layer requires Keras 3.14 or later, which packs it by outputs. Received: "
            f"`{layer.path}` with Keras {keras.__version__}. Use 'replicate' for it, or quantize it to int8."
        )
    if mode is not None and mode not in _MODES:
        raise ValueError(
            f"The quantization of a layer that is split must be int8 or int4. Received: {mode!r} in "
            f"`{layer.path}`. Use 'replicate' for it, or another quantization."
        )


def quantized_axes(layer, axis: int) -> Iterator[tuple[Any, int, str | None]]:
    """The variables of a quantized kernel that are split.

    Args:
        layer: A quantized Dense or EinsumDense.
        axis: The dim of the float kernel that is split.

    Yields:
        Each with its dim, and the name of its size, for messages.

    Raises:
        ValueError: The layer cannot be split along the dim.
    """
    mode = layer.quantization_mode
    check_mode(layer, mode)
    if mode == "int8":
        yield kernel_of(layer), axis, None
        dim = _scale_dim(layer, axis)
        if dim is not None:
            yield layer.kernel_scale, dim, None
        return
    flat_axis, size = _flat_axis(layer, axis)
    block = int4_block_size(layer, None)
    blocks = block not in (None, -1)
    if flat_axis == 1:
        if size % 2:
            raise ValueError(
                f"An int4 layer must have an even number of outputs, two to a byte. Received: {size} in "
                f"`{layer.path}`. Use 'replicate' for it, or quantize it to int8."
            )
        yield kernel_of(layer), 1, "Half the number of outputs (int4 packs two into a byte)"
        for variable in (layer.kernel_scale, layer.kernel_zero if blocks else None):
            if variable is not None:
                yield variable, len(variable.shape) - 1, None
        return
    yield kernel_of(layer), 0, None
    if blocks:
        if size % block:
            raise ValueError(
                f"The number of inputs of a kernel that is split by rows must be a multiple of block_size. "
                f"Received: {size} inputs and block_size={block} in `{layer.path}`. Use a block_size "
                "that divides the inputs, or -1."
            )
        what = f"The number of blocks (block_size={block})"
        yield layer.kernel_scale, 0, what
        yield layer.kernel_zero, 0, what


def quantized_sizes(layer, axis: int, group: Group) -> dict[str, Any]:
    """The attributes with which Keras unpacks an int4 kernel, for this rank's slice."""
    if layer.quantization_mode != "int4":
        return {}
    flat_axis, _ = _flat_axis(layer, axis)
    outputs = 1 if flat_axis == 0 else group.size
    if isinstance(layer, keras.layers.Dense):
        return {int4_outputs.name: int4_outputs(layer) // outputs}
    shape = list(layer.original_kernel_shape)
    shape[axis] //= group.size
    return {
        "original_kernel_shape": tuple(shape),
        int4_columns.name: int4_columns(layer) // outputs,
        **_own_blocks(layer, flat_axis, group),
    }


def quantized_row_attributes(layer, axis: int, group: Group) -> dict[str, Any]:
    """The attributes with which a quantized layer computes this rank's part of the products."""
    found: dict[str, Any] = {"bias": None, "activation": None}
    found |= quantized_sizes(layer, axis, group)
    if isinstance(layer, keras.layers.Dense):
        found |= _own_blocks(layer, 0, group)
    quantizer = getattr(layer, "inputs_quantizer", None)
    if quantizer is not None:
        found["inputs_quantizer"] = _AbsMaxOfAll(layer, quantizer, group)
    return found


def _own_blocks(layer, flat_axis: int, group: Group) -> dict[str, Any]:
    """The index of this rank's block of each of its inputs."""
    if flat_axis == 1 or int4_block_size(layer, None) in (None, -1):
        return {}
    rows, blocks = kernel_of(layer).shape[0], layer.kernel_scale.shape[0]
    begin = group.rank * rows
    whole = tf.convert_to_tensor(layer.g_idx.value)
    return {"g_idx": whole[begin : begin + rows] - float(group.rank * blocks)}


def _scale_dim(layer, axis: int) -> int | None:
    """The dim of an int8 kernel's scale for a dim of the kernel; None if it has none."""
    if isinstance(layer, keras.layers.Dense):
        return 0 if axis == 1 else None
    _, kernel, outputs = terms(layer.equation)
    label = kernel[axis]
    if label not in outputs:
        return None
    return len(layer.kernel_scale.shape) - (len(outputs) - outputs.index(label))


def _flat_axis(layer, axis: int) -> tuple[int, int]:
    """The dim of int4's [inputs, outputs] that is split with a dim of the kernel, and its size.

    Raises:
        ValueError: A slice along the dim is not a slice of the flat array.
    """
    if isinstance(layer, keras.layers.Dense):
        return axis, (int4_inputs(layer) if axis == 0 else int4_outputs(layer))
    shape = layer.original_kernel_shape
    rows = math.prod(shape[dim] for dim in quantization_axes(layer))
    if axis == 0:
        return 0, rows
    if math.prod(shape[:axis]) == rows:
        return 1, int4_columns(layer)
    raise ValueError(
        f"A slice of an int4 kernel must be contiguous in memory. Received: dim {axis} of the kernel of "
        f"shape {tuple(shape)} in `{layer.path}`. Use 'replicate' for it, or quantize it to int8."
    )


class _AbsMaxOfAll:
    """Quantizes inputs of which each rank has a slice, by the largest entry of all ranks."""

    def __init__(self, layer, quantizer, group: Group):
        if type(quantizer) is not keras.quantizers.AbsMaxQuantizer:
            raise ValueError(
                "Inputs of a layer that is split by rows must be quantized by AbsMaxQuantizer. "
                f"Received: {type(quantizer).__name__} in `{layer.path}`. Use 'replicate' for it."
            )
        self._quantizer, self._group, self._name = quantizer, group, layer.path

    def __call__(self, inputs, axis=None):
        quantizer = self._quantizer
        inputs = tf.convert_to_tensor(inputs)
        own = ops.max(ops.abs(inputs), axis=axis, keepdims=True)
        highest = all_reduce(tf.stop_gradient(own), self._group, "max", name=f"{self._name}/scale")
        low, high = quantizer.value_range
        scale = tf.cast(high / (highest + quantizer.epsilon), inputs.dtype)
        outputs = ops.clip(ops.round(inputs * scale), low, high)
        return tf.cast(outputs, quantizer.output_dtype), scale
