"""Lamb, with norms of whole parameters."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.addons.optimizers.attributes import first_moments, second_moments
from tfdist.addons.optimizers.joint import JointUpdates, split_layout
from tfdist.backend.keras.attributes import place_of
from tfdist.sharding.layout import sum_over_parts


@keras.saving.register_keras_serializable(package="tfdist")
class Lamb(JointUpdates, keras.optimizers.Lamb):
    """`keras.optimizers.Lamb` for tensor parallelism and ZeRO: the trust ratio is that of the whole parameter.

    Arguments and updates are those of Keras. The squared norms of all parameters are summed over the ranks
    in one collective for each group.

    Source: You et al., "Large Batch Optimization for Deep Learning" (https://arxiv.org/abs/1904.00962).
    """

    def update_step(self, gradient, variable, learning_rate):
        """Updates the moments; the parameter, if it is whole."""
        parameter = self.parameter_of(variable)
        if split_layout(parameter) is None:
            super().update_step(gradient, variable, learning_rate)
            return
        dtype, place = variable.dtype, place_of(self)(variable)
        gradient, step = tf.cast(gradient, dtype), tf.cast(self.iterations + 1, dtype)
        m, v = first_moments(self)[place], second_moments(self)[place]
        square = keras.ops.square(gradient)  # Of each row of a sparse gradient, as in Keras.
        self.assign_add(m, keras.ops.subtract(gradient, m) * (1 - self.beta_1))
        self.assign_add(v, keras.ops.subtract(square, v) * (1 - self.beta_2))
        mean = m.value / (1.0 - tf.cast(self.beta_1, dtype) ** step)
        scale = tf.sqrt(v.value / (1.0 - tf.cast(self.beta_2, dtype) ** step)) + self.epsilon
        self.postpone(mean / scale, variable, parameter, tf.cast(learning_rate, dtype))

    def update_postponed(self, updates):
        """Updates parameters by the ratios of their norms."""
        directions, variables, parameters, _ = zip(*updates, strict=True)
        # All in one dtype, as they are sent together.
        is_double = any(each.dtype == tf.float64 for each in directions)
        wide = tf.float64 if is_double else tf.float32
        values = (tf.cast(tf.convert_to_tensor(each), wide) for each in (*variables, *directions))
        squares = sum_over_parts(
            [tf.reduce_sum(tf.square(value)) for value in values], parameters * 2
        )
        norms = [tf.sqrt(square) for square in squares]
        pairs = zip(norms[: len(updates)], norms[len(updates) :], strict=True)
        for (direction, variable, _, rate), (weight, norm) in zip(updates, pairs, strict=True):
            is_defined = tf.logical_and(weight > 0, norm > 0)
            ratio = tf.where(is_defined, tf.math.divide_no_nan(weight, norm), tf.ones_like(norm))
            self.assign_sub(variable, tf.cast(ratio, direction.dtype) * rate * direction)
