"""Adafactor, with means over whole parameters of which ranks hold slices."""

from __future__ import annotations

import dataclasses
import math

import keras
import tensorflow as tf

from tfdist.addons.optimizers.attributes import (
    column_factors,
    given_rate,
    parameters,
    row_factors,
    velocities,
)
from tfdist.backend.keras.attributes import place_of
from tfdist.collectives import all_reduce
from tfdist.gradients.norms import sum_of_squares
from tfdist.gradients.sparse import times
from tfdist.sharding.layout import layout_of, update_layout
from tfdist.sharding.parts import Slice


@keras.saving.register_keras_serializable(package="tfdist")
class Adafactor(keras.optimizers.Adafactor):
    """`keras.optimizers.Adafactor` for tensor parallelism: means and norms are those of the whole parameter.

    Arguments and updates are those of Keras.

    Raises:
        ValueError: On `build`, a parameter is split into flat shards (ZeRO) or along two dims.

    Source: Shazeer and Stern, "Adafactor" (https://arxiv.org/abs/1804.04235).
    """

    #: Slices are updated as one process updates the whole.
    elementwise = True
    built: bool

    def build(self, var_list):
        """Creates the state; the factors of a slice are slices or whole."""
        if self.built:
            return
        super().build(var_list)
        factors = zip(var_list, row_factors(self), column_factors(self), strict=True)
        for parameter, rows, columns in factors:
            layout = layout_of(parameter)
            if layout.gradient_shard is not None:
                self.built = False  # Keras has marked it.
                raise ValueError(
                    "Adafactor has factors for rows and columns, which flat shards do not have. Use "
                    f"zero_stage=0. Received: `{parameter.path}` with ZeRO."
                )
            if layout.slice is None or len(parameter.shape) < 2 or rows is None:
                continue
            part = _slice_of(parameter)
            for factor, left_out in ((rows, -1), (columns, -2)):
                update_layout(factor, slice=_without(part, left_out), stage=layout.stage)

    def update_step(self, gradient, variable, learning_rate):
        """Updates the state and the parameter."""
        place = place_of(self)(variable)
        parameter = parameters(self)[place]
        if layout_of(parameter).slice is None:
            super().update_step(gradient, variable, learning_rate)
            return
        part, dtype = _slice_of(parameter), variable.dtype
        means = _Means(part)
        lr = tf.cast(learning_rate, dtype)
        gradient = tf.cast(gradient, dtype)
        # As in Keras, each row of a sparse gradient by itself.
        square = means.own(keras.ops.square(gradient)) + self.epsilon_1
        step = tf.cast(self.iterations + 1, dtype)
        if not callable(given_rate(self)) and self.relative_step:
            lr = tf.minimum(lr, 1 / tf.sqrt(step))
        rho = tf.minimum(lr, 1 / tf.sqrt(step))
        alpha = tf.maximum(tf.cast(self.epsilon_2, dtype), means.rms(means.own(variable))) * rho
        decay = 1 - step**self.beta_2_decay
        velocity = velocities(self)[place]
        if len(part.shape) >= 2:
            r, c = row_factors(self)[place], column_factors(self)[place]
            rows = _average(means.own(r, -1), means.mean(square, -1), decay)
            columns = _average(means.own(c, -2), means.mean(square, -2), decay)
            self.assign(r, means.padded(rows, -1))
            self.assign(c, means.padded(columns, -2))
            # The last dim of the rows is the last but one of the parameter.
            scale = rows / means.mean(rows, -1, dims=len(part.shape) - 1)
            found = scale[..., None] * tf.expand_dims(columns, -2)
        else:
            found = _average(means.own(velocity), square, decay)
        found = means.padded(found)
        self.assign(velocity, found)
        if isinstance(gradient, tf.IndexedSlices):
            # Ids of other ranks have rows of zeros, for which this rank may have no mean yet.
            scales = tf.gather(tf.sqrt(found), gradient.indices)
            scaled = tf.math.divide_no_nan(gradient.values, scales)
            update = tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
        else:
            # Padding would be 0 / 0.
            update = means.padded(means.own(gradient) / tf.sqrt(means.own(found)))
        limit = tf.maximum(tf.cast(1.0, dtype), means.rms(update) / self.clip_threshold)
        self.assign_sub(variable, times(update, alpha / limit))


def _average(before: tf.Tensor, new: tf.Tensor, decay: tf.Tensor) -> tf.Tensor:
    return decay * before + (1 - decay) * new


def _slice_of(parameter: keras.Variable) -> Slice:
    part = layout_of(parameter).slice
    if not isinstance(part, Slice):
        raise ValueError(
            f"Adafactor requires parameters that are split along one dim. Received: `{parameter.path}`, "
            "which is split along two."
        )
    return part


def _without(part: Slice, dim: int) -> Slice | None:
    """The slice of an array without a dim, counted from the end; None if it is the dim of the slice."""
    dim += len(part.shape)
    if dim == part.dim:
        return None
    shape = part.shape[:dim] + part.shape[dim + 1 :]
    return dataclasses.replace(part, dim=part.dim - (dim < part.dim), shape=shape)


class _Means:
    """Means over dims of an array of which each rank has a slice.

    Args:
        part: The slice.
    """

    def __init__(self, part: Slice):
        self._part = part

    def own(self, value, left_out: int | None = None) -> tf.Tensor:
        """This rank's slice without its padding, of an array with all dims but one."""
        part = self._part if left_out is None else _without(self._part, left_out)
        value = tf.convert_to_tensor(value)
        if part is None:
            return value
        index = [slice(None)] * len(part.shape)
        index[part.dim] = slice(0, self._count)
        return value[tuple(index)]

    def padded(self, value: tf.Tensor, left_out: int | None = None) -> tf.Tensor:
        """The slice with its padding."""
        part = self._part if left_out is None else _without(self._part, left_out)
        if part is None or part.share == self._count:
            return value
        ends = [
            (0, part.share - self._count if d == part.dim else 0) for d in range(len(part.shape))
        ]
        return tf.pad(value, ends)

    @property
    def _count(self) -> int:
        """The size of this rank's slice along its dim, without padding."""
        part = self._part
        return max(0, min(part.size, part.shape[part.dim] - part.begin))

    def mean(self, value: tf.Tensor, axis: int, dims: int | None = None) -> tf.Tensor:
        """The mean over a dim of the whole array.

        Args:
            value: The slice; with `dims`, of an array without the last dims.
            axis: The dim, counted from the end.
            dims: The number of dims of the array.
        """
        part = self._part
        dim = axis + (len(part.shape) if dims is None else dims)
        total = tf.reduce_sum(value, axis=axis, keepdims=dims is not None)
        if dim == part.dim:
            total = all_reduce(total, part.group, name="adafactor")
        return total / part.shape[dim]

    def rms(self, value) -> tf.Tensor:
        """The root of the mean square over the whole array, also of rows."""
        total = all_reduce(sum_of_squares(value), self._part.group, name="adafactor")
        return tf.cast(tf.sqrt(total / math.prod(self._part.shape)), value.dtype)
