"""Termination of a training whose loss is not finite."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.gradients.non_finite import NonFiniteGuard, guard_of, put_guard
from tfdist.step.context import current_step, strategy_of
from tfdist.step.hooks import FitContext, FitHook
from tfdist.utils import checks


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
            put_guard(model, guard)
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
