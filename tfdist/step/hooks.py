"""`FitHook`: hooks around `fit`, `evaluate` and `predict` on every rank, and around their steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.step.local_steps import all_optimizers

if TYPE_CHECKING:
    from tfdist.gradients.stage import GradientStage
    from tfdist.sharding.kept import KeptState
    from tfdist.step.keras_step import KerasStep


@dataclasses.dataclass(frozen=True)
class FitContext:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        kind: "fit", "evaluate" or "predict".
        model: The model.
        strategy: The strategy in whose scope the model was created.
        arguments: The arguments of the call, by name. A hook may replace some before the call begins.
        make_position: Creates `position`.
    """

    kind: str
    model: keras.Model
    strategy: tf.distribute.Strategy
    arguments: dict[str, Any]
    make_position: Callable[[], Any] | None = None

    @property
    def callbacks(self) -> list:
        """The current callbacks of the call."""
        return list(tf.nest.flatten(self.arguments.get("callbacks") or []))

    @functools.cached_property
    def position(self) -> Any:
        """The position in the training data, a `DataPosition`, recorded after the first access.

        Raises:
            RuntimeError: The call is not a `fit`.
        """
        if self.make_position is None:
            raise RuntimeError(f"`{self.kind}` does not record its position in the dataset.")
        return self.make_position()


class FitHook:
    """A hook around `fit`, `evaluate` and `predict`, on every rank.

    The hooks of a model are the `fit_hooks` of its strategy, and those of its optimizers and callbacks that
    are of this class, in this order. An `evaluate` inside `fit` belongs to the `fit`. In other methods, such
    as `train_on_batch`, the hooks of the strategy and the optimizers apply, and those of callbacks do not.
    Ranks must have the same types of hooks in the same order.
    """

    #: Stages for the gradients of the model's steps, read when the call begins.
    gradient_stages: Sequence[GradientStage] = ()
    #: Whether methods of a callback at the end of a batch read its logs, so that ranks must reduce them.
    reads_batch_logs = True

    def kept_states(self, model: keras.Model) -> Sequence[KeptState]:
        """The states of this hook that checkpoints of a `fit` save and restore."""
        return ()

    def around(self, fit: FitContext) -> contextlib.AbstractContextManager:
        """A context around the call, which is exited with its exception, if any.

        With an exception it must not call a collective: other ranks may not have raised.
        """
        return contextlib.nullcontext()

    def around_step(self, step: KerasStep) -> contextlib.AbstractContextManager:
        """A context around a step of the model while it is traced, or while it runs eagerly.

        On exit without an exception, `step.outputs` is the return value of the step. The model is traced again
        if the hooks with this method, or the stages, differ from those of its last `fit`.
        """
        return contextlib.nullcontext()

    def explain(self, fit: FitContext, error: Exception) -> Exception | str | None:
        """An exception to raise in place of an exception of the call, a note to add to it, or None."""
        return None


#: The model and the hooks of each running call, the innermost last.
_under_way: list[tuple[keras.Model, list[FitHook]]] = []
#: By model, the hooks with which its training function was traced.
_traced: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()


def fit_hooks(model: keras.Model, callbacks: Sequence = ()) -> list[FitHook]:
    """The hooks of a model: those of its strategy, of its optimizers and among callbacks, each once."""
    strategy = getattr(model, "distribute_strategy", None)
    optimizers = all_optimizers(model)
    found = [*getattr(strategy, "fit_hooks", ()), *optimizers, *callbacks]
    return list({id(each): each for each in found if isinstance(each, FitHook)}.values())


@contextlib.contextmanager
def hooked(fit: FitContext, hooks: Sequence[FitHook]) -> Iterator[None]:
    """Enters the hooks of a call.

    Args:
        fit: The call.
        hooks: Its hooks.
    """
    try:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook.around(fit))
            _under_way.append((fit.model, list(hooks)))
            stack.callback(_under_way.pop)
            yield
    except Exception as error:
        for hook in hooks:
            said = hook.explain(fit, error)
            if isinstance(said, Exception):
                raise said from None
            if said is not None:
                error.add_note(said)
        raise


def active_hooks(model: keras.Model) -> list[FitHook]:
    """The hooks of the current step of a model."""
    for other, hooks in reversed(_under_way):
        if other is model:
            return hooks
    return fit_hooks(model)


def trace_if_changed(model: keras.Model, hooks: Sequence[FitHook]) -> None:
    """Makes `fit` trace the training step again if its hooks have changed."""
    tracing: list = [hook for hook in hooks if type(hook).around_step is not FitHook.around_step]
    tracing += [stage for hook in hooks for stage in hook.gradient_stages]
    before = [reference() for reference in _traced.get(model, ())]
    if tracing == before:
        return
    _traced[model] = [weakref.ref(each) for each in tracing]
    if getattr(model, "train_function", None) is not None:
        model.train_function = None
