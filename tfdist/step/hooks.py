"""`FitHook`: what takes part in a whole `fit`, `evaluate` or `predict` on every rank, and in its steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

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
        strategy: The strategy that it was made under.
        arguments: Of the call, by name. Before the call begins, a hook may replace some.
        make_position: Makes `position`.
    """

    kind: str
    model: keras.Model
    strategy: tf.distribute.Strategy
    arguments: dict[str, Any]
    make_position: Callable[[], Any] | None = None

    @property
    def callbacks(self) -> list:
        """The callbacks of the call, as they are now."""
        return list(tf.nest.flatten(self.arguments.get("callbacks") or []))

    @functools.cached_property
    def position(self) -> Any:
        """The position in the training data, a `DataPosition`, recorded from the first request on.

        Raises:
            RuntimeError: This is no `fit`.
        """
        if self.make_position is None:
            raise RuntimeError(f"`{self.kind}` does not record its position in the data.")
        return self.make_position()


class FitHook:
    """Around a whole `fit`, `evaluate` or `predict`, on every rank.

    Hooks are the model's strategy's `fit_hooks`, its optimizers and its callbacks, where these are of
    this class, in this order. An `evaluate` inside `fit` belongs to the `fit`. Outside of the three, as in
    `train_on_batch`, the strategy's hooks apply and those of callbacks do not. Ranks must have the same
    types of hooks in the same order.
    """

    #: Stages of the gradients of the model's steps, as they are when the call begins.
    gradient_stages: Sequence[GradientStage] = ()
    #: Of a callback: whether methods that end a batch read its logs, so that ranks must agree on them.
    reads_batch_logs = True

    def kept_states(self, model: keras.Model) -> Sequence[KeptState]:
        """What checkpoints of a `fit` save and restore of this hook."""
        del model
        return ()

    def around(self, fit: FitContext) -> contextlib.AbstractContextManager:
        """Entered before the call and left after it, with the exception if there is one.

        With an exception it must not call a collective: other ranks may not have raised.
        """
        del fit
        return contextlib.nullcontext()

    def around_step(self, step: KerasStep) -> contextlib.AbstractContextManager:
        """Around a step of the model while it is traced, or while it runs eagerly.

        When it is left without an exception, `step.outputs` is what the step returned. If other hooks have
        this method, or other stages, than in the last `fit` of the model, the model is traced again.
        """
        del step
        return contextlib.nullcontext()

    def explain(self, fit: FitContext, error: Exception) -> Exception | str | None:
        """What to say of an exception of the call: one to raise in its place, a note to add, or nothing."""
        del fit, error
        return None


#: The model and the hooks of each call under way, the innermost last.
_under_way: list[tuple[keras.Model, list[FitHook]]] = []
#: By model the hooks that its training function was traced with.
_traced: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()


def fit_hooks(model: keras.Model, callbacks: Sequence = ()) -> list[FitHook]:
    """The hooks of a model's strategy and optimizers, and those among callbacks, each once."""
    strategy = getattr(model, "distribute_strategy", None)
    found = [*getattr(strategy, "fit_hooks", ()), *_optimizers(model), *callbacks]
    hooks = {id(each): each for each in found if isinstance(each, FitHook)}
    return list(hooks.values())


def _optimizers(model: keras.Model) -> Iterator[Any]:
    for each in (getattr(model, "optimizer", None), *vars(model).values()):
        while hasattr(type(each), "apply_gradients"):
            yield each
            each = getattr(each, "inner_optimizer", None)


@contextlib.contextmanager
def hooked(fit: FitContext, hooks: Sequence[FitHook]) -> Iterator[None]:
    """Inside, hooks are around a call.

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
    """The hooks of a step of a model that is traced or runs now."""
    for other, hooks in reversed(_under_way):
        if other is model:
            return hooks
    return fit_hooks(model)


def trace_if_changed(model: keras.Model, hooks: Sequence[FitHook]) -> None:
    """Has `fit` trace the training step again, where other hooks are around it than were before."""
    tracing: list = [hook for hook in hooks if type(hook).around_step is not FitHook.around_step]
    tracing += [stage for hook in hooks for stage in hook.gradient_stages]
    before = [reference() for reference in _traced.get(model, ())]
    if tracing == before:
        return
    _traced[model] = [weakref.ref(each) for each in tracing]
    if getattr(model, "train_function", None) is not None:
        model.train_function = None
