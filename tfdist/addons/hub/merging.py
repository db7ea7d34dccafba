"""The weights of fine-tuned KerasHub models with adapters merged, and quantized ones as floats."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.backend.keras.attributes import kernel_of, stored_value, table_of
from tfdist.backend.keras.functional import deferred_weights
from tfdist.backend.keras.private import all_layers
from tfdist.tensor_parallel.attributes import (
    adjust_scale,
    int4_block_size,
    int4_columns,
    int4_inputs,
    int4_outputs,
    variables_of_layer,
)

_PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)
_TABLES = keras.layers.Embedding  # `ReversibleEmbedding` is one.
_MODES = ("int8", "int4")


def quantization_modes(model: keras.Model) -> list[str]:
    """The quantization modes of the layers of a model; empty for a model of floats."""
    return sorted({layer.quantization_mode for layer in all_layers(model)} - {None})


def check_mergeable(model: keras.Model) -> None:
    """Checks that the floats of all quantized layers can be computed.

    Raises:
        ValueError: A layer is quantized to neither int8 nor int4 of this Keras, or has another class.
    """
    for layer in all_layers(model):
        mode = layer.quantization_mode
        if mode is None or not variables_of_layer(layer):
            continue
        known = isinstance(layer, (*_PRODUCTS, _TABLES)) and mode in _MODES
        if not known or (mode == "int4" and not int4_outputs.is_known):
            raise ValueError(
                "`dequantize=True` requires Dense, EinsumDense and Embedding layers in int8, or in int4 "
                f"with Keras 3.14 or later. Received: {mode!r} in `{layer.path}`, a "
                f"{type(layer).__name__}, with Keras {keras.__version__}. Save the model with "
                "`save_to_preset`."
            )


@dataclasses.dataclass(frozen=True)
class PlainModel:
    """A backbone or task of KerasHub without a strategy, adapters or quantized layers, and without values.

    Attributes:
        model: The model.
        dtype: The dtype of its weights.
        layers: Those of its layers that have weights.
        sources: The same layers of the fine-tuned model.
    """

    model: keras.Model
    dtype: str
    layers: tuple[keras.Layer, ...]
    sources: tuple[keras.Layer, ...]

    def is_changed(self, place: int) -> bool:
        """Whether a source has adapters or is quantized."""
        layer = self.sources[place]
        return bool(layer.quantization_mode or getattr(layer, "lora_enabled", False))

    def needs(self, place: int, names: Collection[str]) -> list[keras.Variable]:
        """The variables of a source from which some weights of a plain layer are computed."""
        variables = variables_of_layer(self.sources[place])
        if self.is_changed(place):
            return list(variables)
        return [variable for variable in variables if variable.name in names]

    def values(
        self, place: int, names: Collection[str], wholes: Mapping[int, Any] | None = None
    ) -> dict[str, Any]:
        """Some weights of a layer by name, computed from `needs`.

        Args:
            place: The place of the layer.
            names: The names of the weights.
            wholes: The global arrays of variables by id; None if the variables themselves are global arrays.

        Raises:
            ValueError: The source does not have a weight of the plain layer.
        """
        layer, other = self.sources[place], self.layers[place]
        given = wholes or {}
        found = {
            variable.name: given[id(variable)] if id(variable) in given else stored_value(variable)
            for variable in self.needs(place, names)
        }
        found |= _merged(layer)
        values = {}
        for variable in variables_of_layer(other):
            if variable.name not in names:
                continue
            value = found.get(variable.name)
            if value is None or tuple(value.shape) != tuple(variable.shape):
                raise ValueError(
                    "An exported model must have the weights of its configuration. Received: "
                    f"`{layer.path}` without a `{variable.name}` of shape {tuple(variable.shape)}."
                )
            same = value.dtype.name == tf.as_dtype(self.dtype).name
            values[variable.name] = value if same else tf.cast(value, self.dtype)
        return values


def plain_model(model: keras.Model, *, dtype: str | None = None) -> PlainModel:
    """The plain backbone or task of KerasHub that computes the same as a fine-tuned one.

    Args:
        model: A backbone, or a task.
        dtype: The dtype of the plain weights; None for the widest one of the model.

    Raises:
        ValueError: The layers of the model are not those of its configuration.
    """
    backbone: Any = getattr(model, "backbone", model)
    # The widest dtype of the weights: a layer's own policy is one of computing or of quantizing.
    dtypes = {layer.variable_dtype for layer in all_layers(backbone) if variables_of_layer(layer)}
    dtype = dtype or max(dtypes, key=lambda name: (tf.as_dtype(name).size, name))
    config = backbone.get_config()
    # KerasHub 0.32 leaves `tie_word_embeddings` out of the configuration of Llama.
    for name in inspect.signature(type(backbone).__init__).parameters:
        if name not in config and hasattr(backbone, name):
            config[name] = getattr(backbone, name)
    config["dtype"] = dtype

    def build():
        with deferred_weights():
            plain = type(backbone).from_config(config)
            if model is backbone:
                return plain
            return type(model)(backbone=plain, preprocessor=model.preprocessor, compile=False)

    # The scope of a strategy belongs to one thread; in it, the new weights would be split.
    with ThreadPoolExecutor(1) as thread:
        plain = thread.submit(build).result()
    if quantization_modes(plain):
        raise ValueError(
            "`dequantize=True` is not supported for a backbone with a quantized model inside it. Received: "
            f"`{backbone.name}`. Save it with "
            "`save_to_preset`."
        )
    own, others = (
        tuple(layer for layer in all_layers(each) if variables_of_layer(layer))
        for each in (backbone, getattr(plain, "backbone", plain))
    )
    if [type(layer) for layer in own] != [type(layer) for layer in others]:
        raise ValueError(
            "An exported model must have the layers of its configuration. Received: "
            f"`{backbone.name}`, with other layers than its `get_config()`."
        )
    return PlainModel(plain, dtype, others, own)


def _merged(layer: keras.Layer) -> dict[str, Any]:
    """The weights of a layer that adapters or quantization change, by name, in float32."""
    mode = layer.quantization_mode
    if isinstance(layer, _PRODUCTS) and (mode or layer.lora_enabled):
        kernel = _floats_of_kernel(layer) if mode else _read(kernel_of(layer))
        return {"kernel": _with_adapter(layer, kernel, "lora_kernel")}
    if isinstance(layer, _TABLES) and (mode or layer.lora_enabled):
        table = _floats_of_table(layer, "embeddings") if mode else _read(table_of(layer))
        found = {"embeddings": _with_adapter(layer, table, "lora_embeddings")}
        if mode and not getattr(layer, "tie_weights", True):
            found["reverse_embeddings"] = _floats_of_table(layer, "reverse_embeddings")
        return found
    return {}


def _with_adapter(layer, weight, name: str):
    if not layer.lora_enabled:
        return weight
    a, b = _read(getattr(layer, f"{name}_a")), _read(getattr(layer, f"{name}_b"))
    return weight + (layer.lora_alpha / layer.lora_rank) * ops.matmul(a, b)


def _floats_of_kernel(layer):
    """The dequantized kernel of a Dense or an EinsumDense."""
    scale = _read(layer.kernel_scale)
    if layer.quantization_mode == "int8":
        if isinstance(layer, keras.layers.EinsumDense):
            scale = adjust_scale(layer)(scale)
        return _read(kernel_of(layer)) / scale
    is_dense = isinstance(layer, keras.layers.Dense)
    outputs = int4_outputs(layer) if is_dense else int4_columns(layer)
    floats = _unpacked(layer, kernel_of(layer), outputs, scale, "kernel_zero", axis=1)
    shape = (int4_inputs(layer), outputs) if is_dense else layer.original_kernel_shape
    return tf.reshape(floats, shape)


def _floats_of_table(layer, name: str):
    """The dequantized table of an Embedding; the reverse table has its dims in reverse order."""
    reverse = name == "reverse_embeddings"
    codes = layer.reverse_embeddings if reverse else table_of(layer)
    scale = _read(getattr(layer, f"{name}_scale"))
    if layer.quantization_mode == "int8":
        return _read(codes) / (scale if reverse else scale[:, None])
    if reverse:  # It is packed along its inputs, the dim of a row.
        return _unpacked(layer, codes, layer.output_dim, scale, f"{name}_zero", axis=0, groups=0)
    in_blocks = int4_block_size(layer, None) not in (None, -1)
    scale = scale if in_blocks else scale[:, None]
    return _unpacked(layer, codes, layer.output_dim, scale, f"{name}_zero", axis=1, groups=1)


def _unpacked(layer, codes, size: int, scale, zero: str, *, axis: int, groups: int = 0):
    """The floats of int4: two codes in a byte along `axis`, blocks of rows along `groups`."""
    codes = keras.quantizers.unpack_int4(stored_value(codes), size, axis=axis)
    codes = tf.cast(codes, tf.float32)
    if int4_block_size(layer, None) in (None, -1):
        return codes / scale
    # With blocks, Keras stores codes to be multiplied by the scales; without, to be divided.
    block = tf.cast(stored_value(layer.g_idx), tf.int32)
    zeros = tf.gather(_read(getattr(layer, zero)), block, axis=groups)
    return (codes - zeros) * tf.gather(scale, block, axis=groups)


def _read(variable):
    return tf.cast(stored_value(variable), tf.float32)
