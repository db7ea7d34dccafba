"""Injection of silent errors: a flipped bit on one rank."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_value
from tfdist.step.context import strategy_of
from tfdist.utils import checks

_WHAT = ("weights", "gradient")
#: The integer with the same number of bits.
_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class FlipBit(keras.callbacks.Callback):
    """Flips a bit on one rank during `fit`, as a broken chip does silently.

    For tests of how a training handles it: see `tfdist.callbacks.VerifyModelSync`.

    Args:
        rank: The rank.
        step: The training step of this `fit`, counted from 0, before which a weight is changed; or the
            step, as counted by the optimizer, in which a gradient is changed.
        what: "weights", or "gradient": as passed to the optimizer, after the sum over ranks.
        variable: The variable is the first trainable one whose path contains this; None for the first.
        bit: The index of the bit in its first entry, from the least significant one.
        times: The number of runs of that step in which the gradient is changed. Further runs of the step
            are correct.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or there is no such variable.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        what: str = "weights",
        *,
        variable: str | None = None,
        bit: int = 20,
        times: int = 1,
    ):
        super().__init__()
        self._rank = checks.integer("rank", rank, minimum=0)
        self._step = checks.integer("step", step, minimum=0)
        checks.one_of("what", what, _WHAT)
        self._what, self._part = what, checks.text("variable", variable, optional=True) or ""
        self._bit = checks.integer("bit", bit, minimum=0, maximum=63)
        self._times = checks.integer("times", times, minimum=1)
        self._begun = 0

    def on_train_begin(self, logs=None):
        """Finds the variable, and makes the step compute the wrong gradient."""
        self._begun = 0
        strategy = strategy_of(self.model)
        self._is_here = self._rank == (0 if strategy is None else strategy.mesh.rank)
        found = [v for v in self.model.trainable_variables if self._part in v.path]
        self._variable = found[0] if found else None
        if self._variable is None:
            if not self._is_here:  # As on other stages of a pipeline.
                return
            raise ValueError(
                "`variable` must be a part of the path of a trainable variable. Received: "
                f"variable={self._part!r}. The paths are "
                f"{', '.join(v.path for v in self.model.trainable_variables[:5])}."
            )
        size = tf.as_dtype(self._variable.dtype).size
        if self._bit >= 8 * size:
            raise checks.refuse(
                "bit", self._bit, f"below {8 * size}, the bits of {self._variable.dtype}"
            )
        if self._what == "gradient":
            self._spoil(self.model.optimizer, stored_value(self._variable))
            # A step that was traced before is correct.
            self.model.make_train_function(force=True)

    def on_train_batch_begin(self, batch, logs=None):
        """Changes the weight at its step."""
        if self._what == "weights" and self._is_here and self._begun == self._step:
            stored = stored_value(self._variable)
            stored.assign(_flipped(tf.convert_to_tensor(stored), self._bit))
        self._begun += 1

    def on_train_end(self, logs=None):
        """Restores the optimizer."""
        if self._what == "gradient" and self._variable is not None:
            del self.model.optimizer.update_step
            self.model.make_train_function(force=True)

    def _spoil(self, optimizer, stored: tf.Variable) -> None:
        left = tf.Variable(self._times if self._is_here else 0, trainable=False)
        update = optimizer.update_step

        def update_step(gradient, variable, learning_rate):
            # Under ZeRO the variable is a view of a shard.
            if getattr(variable, "variable", variable) is stored:
                is_time = (optimizer.iterations.value == self._step) & (left > 0)
                left.assign_sub(tf.cast(is_time, left.dtype))
                if isinstance(gradient, tf.IndexedSlices):
                    values = tf.cond(
                        is_time,
                        lambda: _flipped(gradient.values, self._bit),
                        lambda: gradient.values,
                    )
                    gradient = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
                else:
                    gradient = tf.cond(
                        is_time, lambda: _flipped(gradient, self._bit), lambda: gradient
                    )
            return update(gradient, variable, learning_rate)

        optimizer.update_step = update_step


def _flipped(tensor: tf.Tensor, bit: int) -> tf.Tensor:
    """The tensor with one bit of its first entry flipped."""
    integer = _INTEGERS[tensor.dtype.size]
    mask = np.array(1 << bit, "uint64").astype(f"uint{8 * integer.size}")
    mask = tf.constant(mask.view(integer.as_numpy_dtype))
    flat = tf.bitcast(tf.reshape(tensor, [-1]), integer)
    first = tf.bitwise.bitwise_xor(flat[:1], mask)
    flat = tf.concat([first, flat[1:]], axis=0)
    return tf.reshape(tf.bitcast(flat, tensor.dtype), tf.shape(tensor))
