"""Ends a training whose loss is no number any more."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

__all__ = ["NonFiniteGuard", "TerminateOnNonFinite", "guard_of"]

_GUARD = "_tfdist_non_finite_guard"


class TerminateOnNonFinite(keras.callbacks.Callback):
    """Ends the job when the loss was not finite for some training steps in a row.

    Looked at on the device, at every step, and on each rank at its own loss: nothing is
    communicated, and nothing waits. The first rank to count that far ends with an error that names
    the step and the rank; the others then end as when any rank ends. Steps that a loss scale skips
    count too: a loss that overflows again and again does not get better.

    The loss is what `compute_loss` returns, in a pipeline that of the last stage's micro-batches.
    A `train_step` of your own that computes it otherwise is not looked at.

    Args:
        steps: How many in a row.

    Raises:
        ValueError: `steps` is not positive, or the model is not under a tfdist strategy.
        FloatingPointError: By `fit`, when it happens.
    """

    async_safe = True

    def __init__(self, steps: int = 3):
        super().__init__()
        if steps < 1:
            raise ValueError(f"`steps` is 1 or more. Received: {steps}.")
        self._steps = steps

    def set_model(self, model):
        """Puts the guard into the training step."""
        super().set_model(model)
        strategy: Any = model.distribute_strategy
        if not hasattr(strategy, "engine"):
            raise ValueError(
                "TerminateOnNonFinite is for models that are made in the scope of a tfdist "
                f"strategy. Received: a model under {type(strategy).__name__}; take "
                "keras.callbacks.TerminateOnNaN there."
            )
        if guard_of(model) is None:
            setattr(model, _GUARD, NonFiniteGuard(strategy.mesh.rank))
            # A step that was traced before does not know the guard.
            model.train_function = None

    def on_train_begin(self, logs=None):
        """Begins to count."""
        guard_of(self.model).start(self._steps)

    def on_train_end(self, logs=None):
        """Looks no further."""
        guard_of(self.model).start(0)


class NonFiniteGuard:
    """Counts, in the graph of a training step, the steps in a row whose loss was not finite.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int):
        self._rank = rank
        with tf.init_scope(), tf.device("/CPU:0"):
            self._limit, self._in_row, self._steps = (
                tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)
            )
            self._is_bad = tf.Variable(False, trainable=False)

    def start(self, limit: int) -> None:
        """Begins to count anew, up to `limit`; 0 for no limit."""
        self._limit.assign(limit)
        self._in_row.assign(0)
        self._steps.assign(0)
        self._is_bad.assign(False)

    def note(self, loss) -> None:
        """Takes in a loss of the step that is under way."""
        finite = tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(loss)))
        self._is_bad.assign(tf.logical_or(self._is_bad, tf.logical_not(finite)))

    def end_step(self) -> list:
        """Counts the step.

        Returns:
            What gradients wait for, so that they reach other ranks only where training goes on:
            else ranks that have only the bad weights of this one would count as far by then.
        """
        self._steps.assign_add(1)
        self._in_row.assign(tf.where(self._is_bad, self._in_row + 1, 0))
        self._is_bad.assign(False)
        is_over = tf.logical_and(self._limit > 0, self._in_row >= self._limit)
        goes_on = tf.debugging.Assert(tf.logical_not(is_over), ["The loss is not finite"])
        return [] if tf.executing_eagerly() else [goes_on]

    def error(self) -> FloatingPointError | None:
        """What to say of the steps so far; None where there is nothing."""
        in_row, limit = int(self._in_row), int(self._limit)
        if not limit or in_row < limit:
            return None
        return FloatingPointError(
            f"The loss of rank {self._rank} was not finite for {in_row} training steps in a row, "
            f"up to step {int(self._steps)} of this `fit`. Lower the learning rate, clip gradients "
            "(`global_clipnorm`), or look for bad samples in this rank's rows."
        )


def guard_of(model) -> NonFiniteGuard | None:
    """The guard that a `TerminateOnNonFinite` has put into a model."""
    return getattr(model, _GUARD, None)
