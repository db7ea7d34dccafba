"""The part of a training step that counts losses that are not finite.

`tfdist.callbacks.TerminateOnNonFinite` adds it.
"""

from __future__ import annotations

import tensorflow as tf

_GUARD = "_tfdist_non_finite_guard"


class NonFiniteGuard:
    """Counts, in the graph of a training step, consecutive steps whose loss was not finite.

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
        """Resets the counts, and sets the limit; 0 for no limit."""
        self._limit.assign(limit)
        self._in_row.assign(0)
        self._steps.assign(0)
        self._is_bad.assign(False)

    def note(self, loss) -> None:
        """Adds a loss of the current step."""
        finite = tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(loss)))
        self._is_bad.assign(tf.logical_or(self._is_bad, tf.logical_not(finite)))

    def end_step(self) -> list:
        """Counts the step.

        Returns:
            Control inputs for gradients, so that other ranks receive them only if training continues.
            Otherwise ranks with the bad weights of this one would have reached the same count.
        """
        self._steps.assign_add(1)
        self._in_row.assign(tf.where(self._is_bad, self._in_row + 1, 0))
        self._is_bad.assign(False)
        is_over = tf.logical_and(self._limit > 0, self._in_row >= self._limit)
        check = tf.debugging.Assert(tf.logical_not(is_over), ["The loss is not finite"])
        return [] if tf.executing_eagerly() else [check]

    def error(self) -> FloatingPointError | None:
        """The error to raise after the steps so far; None if the limit is not reached."""
        in_row, limit = int(self._in_row), int(self._limit)
        if not limit or in_row < limit:
            return None
        return FloatingPointError(
            f"The loss of rank {self._rank} was not finite for {in_row} training steps in a row, "
            f"up to step {int(self._steps)} of this `fit`. Lower the learning rate, clip gradients "
            "(`global_clipnorm`), or look for bad samples in this rank's rows."
        )


def guard_of(model) -> NonFiniteGuard | None:
    """The guard that a `TerminateOnNonFinite` has added to a model."""
    return getattr(model, _GUARD, None)


def put_guard(model, guard: NonFiniteGuard) -> None:
    """Adds a guard to a model, whose training step has not been traced yet."""
    setattr(model, _GUARD, guard)
