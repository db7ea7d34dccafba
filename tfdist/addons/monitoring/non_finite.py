"""Termination of a training whose loss is not finite."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.gradients.non_finite import GUARD, guard_of
from tfdist.step.context import current_step, strategy_of
from tfdist.step.hooks import FitContext, FitHook
from tfdist.utils import checks


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


class TerminateOnNonFinite(keras.callbacks.Callback, FitHook):
    """Ends the job when the loss was not finite for some consecutive training steps.

    The check runs on the device at every step, on each rank for its own loss, without communication
    or waiting. The first rank that reaches the limit ends with an error that names the step and the
    rank; the others then end as when any rank ends. Steps that a loss scale skips count too: a loss
    that overflows repeatedly does not recover.

    The loss is the one that `compute_loss` returns, in a pipeline that of the last stage's
    micro-batches. The loss of a custom `train_step` that computes it otherwise is not checked.

    Args:
        steps: The number of consecutive steps.

    Raises:
        ValueError: `steps` is not positive, or the model is not under a tfdist strategy.
        FloatingPointError: By `fit`, when the limit is reached.
    """

    async_safe = True

    def __init__(self, steps: int = 3):
        super().__init__()
        self._steps = checks.integer("steps", steps, minimum=1)

    def set_model(self, model):
        """Puts the guard into the training step."""
        super().set_model(model)
        strategy = strategy_of(model)
        if strategy is None:
            raise ValueError(
                "TerminateOnNonFinite requires a model that is created in the scope of a tfdist "
                f"strategy. Received: a model under {type(model.distribute_strategy).__name__}. Use "
                "keras.callbacks.TerminateOnNaN."
            )
        guard = guard_of(model)
        if guard is None:
            guard = NonFiniteGuard(strategy.mesh.rank)
            setattr(model, GUARD, guard)
            model.compute_loss = _watched(model.compute_loss, guard)
            # A step that was traced before has no guard.
            model.train_function = None
        self._guard = guard

    def explain(self, fit: FitContext, error: Exception) -> Exception | None:
        """See `FitHook.explain`: the error that the guard has found."""
        guard = guard_of(fit.model)
        if guard is None or not isinstance(error, tf.errors.InvalidArgumentError):
            return None
        return guard.error()

    def on_train_begin(self, logs=None):
        """Begins to count."""
        self._guard.start(self._steps)

    def on_train_end(self, logs=None):
        """Stops checking."""
        self._guard.start(0)


def _watched(compute_loss, guard: NonFiniteGuard):
    """A model's `compute_loss` with the guard's check of the loss in training steps."""

    @functools.wraps(compute_loss)
    def watched(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        step = current_step()
        if step is None or step.kind != "train" or loss is None:
            return loss
        guard.note(loss)
        goes_on = guard.end_step()

        @custom_gradient
        def wait(loss):
            def gradient(dy):
                with tf.control_dependencies(goes_on):
                    return tf.identity(dy)

            return tf.identity(loss), gradient

        return wait(loss)

    return watched
