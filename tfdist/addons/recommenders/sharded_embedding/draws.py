"""The initial values of a slice of an array, without the array.

TensorFlow's Philox generator is a function of a key and a counter: the i-th block of four numbers is
that of the counter plus i. So numbers in the middle of an array can be drawn directly, and are bitwise
equal to those that Keras' initializers draw for the whole array (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.private import draw_seed
from tfdist.sharding.parts import Slice, deep_copy

#: The float numbers of one block of Philox.
_BLOCK = 4
#: The counters that TensorFlow reserves for a block, where a number may take several draws.
_TRUNCATED_BLOCK = 256
#: How many numbers are drawn at once: superfluous ones are discarded after each chunk.
_CHUNK = 1 << 20

_OPS = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1


class SliceDrawn(keras.initializers.Initializer):
    """An initializer that creates only a slice of an array, where that is possible.

    Args:
        whole: The initializer of the array.
    """

    def __init__(self, whole: Any):
        self.whole = whole

    def __call__(self, shape, dtype=None):
        """The array."""
        return self.whole(shape, dtype=dtype)

    def read_slice(self, part: Slice, dtype=None):
        """The slice, padded with zeros. Unknown initializers draw the whole array."""
        dtype = keras.backend.standardize_dtype(dtype)
        if not can_slice(self.whole, part.shape, dtype):
            return deep_copy(part.slice_of(self.whole(part.shape, dtype=dtype)))
        return tf.convert_to_tensor(_fill(self.whole, part, dtype))

    def get_config(self) -> dict[str, Any]:
        """The configuration, with the initializer of the array."""
        return {"whole": keras.initializers.serialize(self.whole)}


def can_slice(initializer: Any, shape: tuple[int, ...], dtype: str = "float32") -> bool:
    """Whether the values of a slice can be drawn without those of the whole array.

    That is so for Keras' `Constant`, `Zeros`, `Ones`, `RandomUniform`, `RandomNormal`,
    `TruncatedNormal` and those that scale by the variance (`GlorotUniform`, `HeNormal` and so on),
    in float32, of matrices that are not on a GPU.

    Args:
        initializer: The initializer.
        shape: The shape of the array.
        dtype: Its dtype.
    """
    if not tf.executing_eagerly() or len(shape) != 2:
        return False
    if _constant_of(initializer) is not None:
        return True
    return dtype == "float32" and _distribution_of(initializer, shape) is not None


def _constant_of(initializer: Any) -> float | None:
    """The number with which an initializer fills arrays; None for other initializers."""
    kinds = keras.initializers
    for kind, value in ((kinds.Zeros, 0.0), (kinds.Ones, 1.0)):
        if type(initializer) is kind:
            return value
    is_constant = type(initializer) is kinds.Constant
    return (
        float(initializer.value)
        if is_constant and isinstance(initializer.value, int | float)
        else None
    )


def _draw_of(initializer: Any, shape: tuple[int, ...]) -> Callable[[int, int], tf.Tensor]:
    """A function that draws a range of the flattened array; it advances a seed generator once."""
    distribution = _distribution_of(initializer, shape)
    if distribution is None:
        raise ValueError(f"Slices of this initializer cannot be drawn. Received: {initializer!r}.")
    kind, scale, offset = distribution
    seed = draw_seed(initializer.seed)
    if seed.dtype != tf.int32:
        # As in Keras' `random` for TensorFlow.
        seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def draw(begin: int, size: int) -> tf.Tensor:
        block = begin // _BLOCK
        skip = block * (_TRUNCATED_BLOCK if kind == "truncated_normal" else 1)
        # The first half of the counter starts at zero, so there is no carry.
        moved = tf.bitcast(counter, tf.int64) + tf.constant([skip, 0], tf.int64)
        drawn = _OPS[kind](
            shape=[size + begin - block * _BLOCK],
            key=key,
            counter=tf.bitcast(moved, tf.uint64),
            alg=_PHILOX,
            dtype=tf.float32,
        )
        return drawn[begin - block * _BLOCK :] * scale + offset

    return draw


def _distribution_of(
    initializer: Any, shape: tuple[int, ...]
) -> tuple[str, tf.Tensor, tf.Tensor] | None:
    """The distribution, and the scale and offset of its numbers."""
    kinds = keras.initializers
    if type(initializer) is kinds.RandomUniform:
        return _uniform(initializer.minval, initializer.maxval)
    if type(initializer) is kinds.RandomNormal:
        return "normal", tf.constant(initializer.stddev), tf.constant(initializer.mean)
    if type(initializer) is kinds.TruncatedNormal:
        return "truncated_normal", tf.constant(initializer.stddev), tf.constant(initializer.mean)
    is_known = isinstance(initializer, kinds.VarianceScaling)
    if not is_known or type(initializer).__call__ is not kinds.VarianceScaling.__call__:
        return None
    if initializer.input_axes is not None or initializer.output_axes is not None:
        return None
    fans = {"fan_in": shape[0], "fan_out": shape[1]}
    scale = initializer.scale / max(1.0, fans.get(initializer.mode, sum(shape) / 2.0))
    if initializer.distribution == "truncated_normal":
        # The standard deviation of a normal distribution that is truncated at two of them, as in Keras.
        stddev = math.sqrt(scale) / 0.87962566103423978
        return "truncated_normal", tf.constant(stddev), tf.constant(0.0)
    if initializer.distribution == "untruncated_normal":
        return "normal", tf.constant(math.sqrt(scale)), tf.constant(0.0)
    limit = math.sqrt(3.0 * scale)
    return _uniform(-limit, limit)


def _uniform(low: float, high: float) -> tuple[str, tf.Tensor, tf.Tensor]:
    offset = tf.constant(low, tf.float32)
    return "uniform", tf.constant(high, tf.float32) - offset, offset


def _fill(initializer: Any, part: Slice, dtype: str) -> np.ndarray:
    values = np.zeros(part.local_shape, tf.as_dtype(dtype).as_numpy_dtype)
    rows, width = part.shape
    begin, size = part.begin, max(0, min(part.size, part.shape[part.dim] - part.begin))
    constant = _constant_of(initializer)
    if constant is not None:
        values[(slice(size),) if part.dim == 0 else (slice(None), slice(size))] = constant
        return values
    draw = _draw_of(initializer, part.shape)
    # For columns, all numbers are drawn and most of them discarded.
    first, last = (begin, begin + size) if part.dim == 0 else (0, rows)
    step = max(1, _CHUNK // width)
    for row in range(first, last, step):
        some = min(step, last - row)
        drawn = draw(row * width, some * width).numpy().reshape(some, width)
        if part.dim == 0:
            values[row - first : row - first + some] = drawn
        else:
            values[row : row + some, :size] = drawn[:, begin : begin + size]
    return values
