"""Weights of several experts, each drawn as the kernel of a dense layer is."""

from __future__ import annotations

import tensorflow as tf

from tfdist.layers.initializers import again


class OfEachExpert:
    """An initializer of [experts, ...] that draws each expert's weights by itself.

    Keras would take the dim of experts for part of a kernel's field, and draw all too narrow.

    Args:
        initializer: Of one expert's weights.
        num_experts: Their number.
    """

    def __init__(self, initializer, num_experts: int):
        self._each = [_of_expert(initializer, number) for number in range(num_experts)]

    def __call__(self, shape, dtype=None):
        """All experts' weights."""
        return tf.stack([tf.convert_to_tensor(draw(shape[1:], dtype)) for draw in self._each])

    def read_slice(self, part, dtype=None):
        """A part of them: no more experts are drawn than it is of."""
        begin = part.origin[0]
        inner = part.levels[-1]
        number = part.local_shape[0]
        drawn = [draw(part.shape[1:], dtype) for draw in self._each[begin : begin + number]]
        own = tf.stack([tf.convert_to_tensor(each) for each in drawn])
        return own if inner.dim == 0 else inner.slice_of(own)


def _of_expert(initializer, number: int):
    """The initializer for one more expert; a seed that was given is not every expert's."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    seed = config.get("seed")
    if isinstance(seed, int):
        return type(initializer).from_config({**config, "seed": seed + number})
    return again(initializer)
