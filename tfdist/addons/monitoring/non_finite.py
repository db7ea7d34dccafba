"""Ends a training whose loss is no number any more."""

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
        self._steps = checks.integer("steps", steps, minimum=1)

    def set_model(self, model):
        """Puts the guard into the training step."""
        super().set_model(model)
        strategy = strategy_of(model)
        if strategy is None:
            raise ValueError(
                "TerminateOnNonFinite is for models that are made in the scope of a tfdist "
                f"strategy. Received: a model under {type(model.distribute_strategy).__name__}; take "
                "keras.callbacks.TerminateOnNaN there."
            )
        guard = guard_of(model)
        if guard is None:
            guard = NonFiniteGuard(strategy.mesh.rank)
            put_guard(model, guard)
            model.compute_loss = _watched(model.compute_loss, guard)
            # A step that was traced before does not know the guard.
            model.train_function = None
        self._guard = guard

    def explain(self, fit: FitContext, error: Exception) -> Exception | None:
        """See `FitHook.explain`: what the guard has found."""
        guard = guard_of(fit.model)
        if guard is None or not isinstance(error, tf.errors.InvalidArgumentError):
            return None
        return guard.error()

    def on_train_begin(self, logs=None):
        """Begins to count."""
        self._guard.start(self._steps)

    def on_train_end(self, logs=None):
        """Looks no further."""
        self._guard.start(0)


def _watched(compute_loss, guard: NonFiniteGuard):
    """A model's `compute_loss`, whose loss the guard looks at in training steps."""

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
