"""Layer and RMS normalization of replicated activations, or of a slice of the sequence."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.kernels import kernels, kernels_enabled
from tfdist.layers.base import TensorParallelLayer
from tfdist.sharding.weights import value_tensor
from tfdist.utils import checks


class _LastDimNormalization(TensorParallelLayer):
    """The arguments and weights of both normalizations."""

    def __init__(self, *, sequence_parallel: bool = False, **kwargs):
        axis, rms_scaling = kwargs.pop("axis", -1), kwargs.pop("rms_scaling", False)
        if axis not in (-1, [-1], (-1,)) or rms_scaling:
            raise ValueError(
                f"{type(self).__name__} does not support an `axis` other than the last, or "
                f"`rms_scaling`. Received: axis={axis}, rms_scaling={rms_scaling}. For other axes use "
                "the layer of keras.layers, and for RMS scaling RMSNormalization."
            )
        if "epsilon" in kwargs:
            checks.number("epsilon", kwargs["epsilon"], minimum=0)
        super().__init__(axis=-1, sequence_parallel=sequence_parallel, **kwargs)

    def build(self, input_shape):
        """Adds the weights."""
        super().build(input_shape)
        self._mark_partial(*self.weights)


@keras.saving.register_keras_serializable(package="tfdist")
class LayerNormalization(_LastDimNormalization, keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` over the last dim, with a custom backward pass.

    Keras differentiates each step of the formula; this layer uses the closed form (Ba et al. 2016), and
    keeps only the normalized input.

    Args:
        sequence_parallel: Whether the input is this tensor rank's slice of the sequence.
        **kwargs: As for `keras.layers.LayerNormalization`, without `axis` and `rms_scaling`.
    """

    def call(self, inputs):
        """Maps [..., features] to the same shape."""
        found = normalized_in_one_pass(self, inputs)
        return _normalized(self, inputs, self.gamma, self.beta) if found is None else found

    def get_config(self):
        """The configuration, which is the same on any mesh."""
        config = super().get_config()
        config.pop("rms_scaling", None)
        return config


@keras.saving.register_keras_serializable(package="tfdist")
class RMSNormalization(_LastDimNormalization, keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` over the last dim, with a custom backward pass.

    Like `LayerNormalization` it uses the closed form, and keeps only the normalized input (Zhang and
    Sennrich 2019, "Root Mean Square Layer Normalization").

    Args:
        sequence_parallel: Whether the input is this tensor rank's slice of the sequence.
        **kwargs: As for `keras.layers.RMSNormalization`, without `axis`.
    """

    def call(self, inputs):
        """Maps [..., features] to the same shape."""
        return _normalized(self, inputs, self.scale, None, centers=False)


def normalized_in_one_pass(layer: keras.layers.LayerNormalization, inputs):
    """The output of a layer for [..., features], by the compiled library in one pass.

    None outside of steps on CPUs, without a scale or an offset, and for dtypes that it does not support.
    """
    if layer.gamma is None or layer.beta is None or inputs.dtype.size > 4 or not kernels_enabled():
        return None
    scale, offset = (tf.cast(value_tensor(each), tf.float32) for each in (layer.gamma, layer.beta))
    return tf.cast(_one_pass(inputs, scale, offset, layer.epsilon), layer.compute_dtype)


def _wide(inputs):
    return tf.cast(inputs, _wide_dtype(inputs))


def _wide_dtype(inputs) -> tf.DType:
    return tf.float32 if inputs.dtype.size < 4 else inputs.dtype


def _one_pass(inputs, scale, offset, epsilon: float):
    """The output with scale and offset, by the compiled library, which keeps the input for the gradient."""

    @custom_gradient
    def normalize(x, scale, offset):
        y, mean, inverse = kernels().tfdist_layer_norm(
            x=_wide(x), scale=scale, offset=offset, epsilon=epsilon
        )

        def gradient(dy):
            dx, *others = kernels().tfdist_layer_norm_gradient(
                dy=dy, x=_wide(x), scale=scale, mean=mean, inverse=inverse
            )
            return tf.cast(dx, x.dtype), *others

        return y, gradient

    return normalize(inputs, scale, offset)


def _normalized(layer: keras.layers.Layer, inputs, scale, offset, *, centers: bool = True):
    """The output, computed in float32 or wider.

    The gradient keeps the normalized input, or the input if its dtype is narrower.

    Args:
        layer: The layer, whose `epsilon` is added to the variance.
        inputs: Shape [..., features].
        scale: A variable of shape [features], or None.
        offset: The same.
        centers: Whether the mean is subtracted.
    """
    scale, offset = (
        None if each is None else tf.cast(value_tensor(each), _wide_dtype(inputs))
        for each in (scale, offset)
    )

    @custom_gradient
    def normalize(x, *_):
        def centered():
            wide = _wide(x)
            return wide - mean if centers else wide

        mean = tf.reduce_mean(_wide(x), axis=-1, keepdims=True) if centers else None
        variance = tf.reduce_mean(tf.square(centered()), axis=-1, keepdims=True)
        inverse = tf.math.rsqrt(variance + layer.epsilon)
        y = centered() * inverse

        def gradient(dy):
            again = y if x.dtype.size >= 4 else centered() * inverse
            inner = dy if scale is None else dy * scale
            along = tf.reduce_mean(inner * again, axis=-1, keepdims=True)
            shift = tf.reduce_mean(inner, axis=-1, keepdims=True) if centers else 0.0
            found = [tf.cast(inverse * (inner - shift - again * along), x.dtype)]
            others = tf.range(tf.rank(dy) - 1)
            if scale is not None:
                found.append(tf.reduce_sum(dy * again, others))
            if offset is not None:
                found.append(tf.reduce_sum(dy, others))
            return tuple(found)

        outputs = y if scale is None else y * scale
        return outputs if offset is None else outputs + offset, gradient

    found = normalize(inputs, *(each for each in (scale, offset) if each is not None))
    return tf.cast(found, layer.compute_dtype)
