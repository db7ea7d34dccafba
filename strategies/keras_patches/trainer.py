"""`fit`, `evaluate` and `predict`: checks and synchronization around Keras' loops."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TensorFlowTrainer
from tfdist.collectives import all_reduce
from tfdist.data.random_state import share_random_state
from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitContext, fit_hooks, hooked, trace_if_changed
from tfdist.strategies.keras_patches.agreement import check_agreement
from tfdist.strategies.keras_patches.callbacks import (
    callbacks_of_rank,
    check_callbacks,
    reads_batch_logs,
)
from tfdist.strategies.keras_patches.data import batch_of, comparing_first_batch, recording_position
from tfdist.strategies.keras_patches.models import (
    adopt_optimizers,
    out_of_memory,
    strategy_of_ranks,
)
from tfdist.strategies.keras_patches.scopes import warn_of_no_scope
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states

PATCHES = Patches()

_logger = logging.getLogger("tfdist")


@PATCHES.of(TensorFlowTrainer, "fit", "self", "x", "y")
def _fit(self, *args, original, **kwargs):
    with _under_way("fit", original, self, *args, **kwargs) as arguments:
        return original(**arguments)


@PATCHES.of(TensorFlowTrainer, "evaluate", "self", "x", "y")
def _evaluate(self, *args, original, **kwargs):
    with _under_way("evaluate", original, self, *args, **kwargs) as arguments:
        return original(**arguments)


@PATCHES.of(TensorFlowTrainer, "predict", "self", "x")
def _predict(self, *args, original, **kwargs):
    with _under_way("predict", original, self, *args, **kwargs) as arguments:
        return original(**arguments)


@contextlib.contextmanager
def _under_way(kind: str, original: Callable, model, *args, **kwargs) -> Iterator[dict[str, Any]]:
    """Checks the arguments of a call on all ranks, and enters its hooks.

    Yields:
        The arguments for `original`.
    """
    arguments = _arguments(original, model, *args, **kwargs)
    strategy = strategy_of_ranks(model)
    given = arguments["callbacks"]
    if isinstance(given, keras.callbacks.CallbackList) and kind != "evaluate":
        arguments["callbacks"] = list(given.callbacks)
    elif isinstance(given, keras.callbacks.CallbackList):
        # An `evaluate` inside `fit`, whose callbacks and hooks are active already.
        if strategy is not None:
            synchronize_layer_states(model)
        yield arguments
        return
    if kind == "fit" and strategy_of(model) is None:
        warn_of_no_scope(model)
    elif kind == "fit":
        adopt_optimizers(model, strategy_of(model))
    with contextlib.ExitStack() as stack:
        make_position = functools.partial(recording_position, stack) if kind == "fit" else None
        fit = FitContext(kind, model, model.distribute_strategy, arguments, make_position)
        hooks = fit_hooks(model, fit.callbacks)
        if strategy is not None:
            check_agreement(strategy, kind, arguments, hooks)
            if kind == "fit":
                share_random_state(strategy.group())
                comparing_first_batch(stack)
            else:
                synchronize_layer_states(model)
        stack.enter_context(out_of_memory(model))
        stack.enter_context(hooked(fit, hooks))
        if strategy is not None:
            _prepare_callbacks(strategy, arguments, stack, training=kind == "fit")
        if kind == "fit" and strategy_of(model) is not None:
            trace_if_changed(model, hooks)
        if kind == "predict" and strategy is not None:
            stack.enter_context(strategy.extended.predicting())
        yield arguments


def _arguments(original, *args, **kwargs) -> dict:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    extra = bound.arguments.pop("kwargs", {})
    return {**bound.arguments, **extra}


@PATCHES.of(TensorFlowTrainer, "_maybe_symbolic_build")
def _maybe_symbolic_build(self, iterator=None, data_batch=None, *, original):
    """Builds the model from the specification of a batch, for which Keras would draw a batch.

    Keras draws it only under a strategy, so that a dataset that shuffles would yield another order than without
    one. A model that cannot be built in this way creates its variables in the first step, as without a
    strategy: a model without `call`, such as that of a GAN, or with a custom format of data.
    """
    strategy = strategy_of(self)
    if strategy is None:
        if iterator is not None and hasattr(self.distribute_strategy, "fit_hooks"):
            # An asynchronous strategy, which is not a `DistributedStrategy`.
            return original(self, None, batch_of(iterator))
        return original(self, iterator, data_batch)
    if type(self).call is keras.Model.call:
        return None
    if iterator is not None:
        data_batch = batch_of(iterator)
    try:
        return original(self, None, data_batch)
    except Exception as error:
        if type(self).train_step is keras.Model.train_step:
            raise
        # The first step raises errors of the model itself again.
        _logger.info("%s creates its variables in the first step: %s", self.name, error)
        return None


def _prepare_callbacks(
    strategy, arguments: dict, stack: contextlib.ExitStack, *, training: bool
) -> None:
    """Sets the callbacks and the verbosity of this rank, and whether logs of batches are reduced, until the end."""
    given = list(tf.nest.flatten(arguments["callbacks"] or []))
    check_callbacks(given, arguments["self"])
    wanted = reads_batch_logs(given) or arguments["verbose"] in (1, "auto")
    anywhere = all_reduce(tf.constant(wanted), strategy.group(), "max", name="reads-batch-logs")
    is_read = strategy.extended.batch_logs_read
    # This call may be in a callback of another one.
    stack.callback(is_read.assign, is_read.numpy())
    is_read.assign(anywhere)
    arguments["callbacks"] = callbacks_of_rank(given, strategy, training=training)
    if not strategy.is_chief:
        arguments["verbose"] = 0
