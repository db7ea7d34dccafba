"""The initializer of weights of several experts, each drawn like the kernel of a dense layer."""

from __future__ import annotations

import tensorflow as tf

from tfdist.layers.initializers import again


class OfEachExpert:
    """An initializer of [experts, ...] that draws each expert's weights separately.

    Keras would count the dim of experts as part of a kernel's receptive field, and scale the values down.

    Args:
        initializer: For one expert's weights.
        num_experts: The number of experts.
    """

    def __init__(self, initializer, num_experts: int):
        self._each = [_of_expert(initializer, number) for number in range(num_experts)]

    def __call__(self, shape, dtype=None):
        """The weights of all experts."""
        return tf.stack([tf.convert_to_tensor(draw(shape[1:], dtype)) for draw in self._each])

    def read_slice(self, part, dtype=None):
        """A part of the weights, for which only the experts in it are drawn."""
        begin = part.origin[0]
        inner = part.levels[-1]
        number = part.local_shape[0]
        drawn = [draw(part.shape[1:], dtype) for draw in self._each[begin : begin + number]]
        own = tf.stack([tf.convert_to_tensor(each) for each in drawn])
        return own if inner.dim == 0 else inner.slice_of(own)


def _of_expert(initializer, number: int):
    """The initializer of an expert, with a different seed for each."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    seed = config.get("seed")
    if isinstance(seed, int):
        return type(initializer).from_config({**config, "seed": seed + number})
    return again(initializer)
