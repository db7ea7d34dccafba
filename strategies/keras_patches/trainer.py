"""`fit`, `evaluate` and `predict`: what ranks agree on around Keras' own loops."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import Checkpointer
from tfdist.collectives import all_reduce
from tfdist.context import strategy_of
from tfdist.data.position import DataPosition
from tfdist.data.sharding import row_range
from tfdist.data.tokens import check_tokenwise, own_tokens
from tfdist.gradients.non_finite import guard_of
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import TensorFlowTrainer, all_layers
from tfdist.monitoring import VerifyModelSync
from tfdist.monitoring.gradient_noise import GradientNoise
from tfdist.monitoring.memory_reports import parameter_bytes
from tfdist.pipeline import PipelineModel
from tfdist.strategies.asynchronous import asynchronous_strategy_of
from tfdist.strategies.keras_patches.agreement import check_agreement
from tfdist.strategies.keras_patches.asynchronous import batch_of
from tfdist.strategies.keras_patches.callbacks import (
    callbacks_of_rank,
    check_callbacks,
    reads_batch_logs,
)
from tfdist.strategies.keras_patches.data import first_batch_compared, recorded
from tfdist.strategies.keras_patches.local_steps import framed, global_parameters
from tfdist.strategies.keras_patches.scopes import notice_no_scope
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states
from tfdist.strategies.randomness import share_random_state

__all__ = ["PATCHES"]

_logger = logging.getLogger("tfdist")


def _parallel_strategy(model):
    """The model's strategy, if it is tfdist's and there are other ranks.

    Raises:
        ValueError: The ranks hold parts of sequences, and a layer of the model may mix tokens.
    """
    strategy: Any = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return None
    if strategy.token_group.size > 1:
        # A rank of a pipeline holds some of the layers, and refuses as the others do.
        whole = model.chain_model if isinstance(model, PipelineModel) else model
        check_tokenwise(whole, all_layers(whole))
    return strategy


def _arguments(original, *args, **kwargs) -> dict:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    extra = bound.arguments.pop("kwargs", {})
    return {**bound.arguments, **extra}


def _fit(self, *args, original, **kwargs):
    arguments = _arguments(original, self, *args, **kwargs)
    asynchronous = asynchronous_strategy_of(self)
    if asynchronous is not None:
        return asynchronous.fit(functools.partial(_fit_to_the_end, original), arguments)
    strategy = _parallel_strategy(self)
    if strategy_of(self) is None:
        notice_no_scope(self)
    else:
        _adopt_optimizers(self, strategy_of(self))
        arguments["callbacks"] = framed(self, tf.nest.flatten(arguments["callbacks"] or []))
    if strategy is None:
        return _fit_to_the_end(original, arguments)
    _refuse_xla(self, strategy)
    check_agreement(strategy, "fit", arguments)
    share_random_state(strategy.group())
    _prepare_callbacks(strategy, arguments, training=True)
    with first_batch_compared():
        return _fit_to_the_end(original, arguments)


def _refuse_xla(model, strategy) -> None:
    if model.jit_compile:
        raise ValueError(
            "XLA cannot compile collectives of "
            f"the {strategy.engine.name} engine. Received: compile(jit_compile=True) on "
            f"{strategy.mesh.size} ranks. Leave `jit_compile` out, or set it to False."
        )


def _fit_to_the_end(original, arguments: dict):
    """`fit`, whose place can be saved, and whose failure says what the guard of the loss found."""
    self = arguments["self"]
    callbacks = list(tf.nest.flatten(arguments["callbacks"] or []))
    position = DataPosition()
    savers = [callback for callback in callbacks if isinstance(callback, Checkpointer)]
    for saver in savers:
        saver.attach(position, callbacks)
    try:
        for callback in callbacks:
            if isinstance(callback, GradientNoise):
                callback.prepare(self)
        with recorded(position) if savers else contextlib.nullcontext():
            return original(**arguments)
    except tf.errors.InvalidArgumentError:
        guard = guard_of(self)
        error = None if guard is None else guard.error()
        if error is None:
            raise
        raise error from None
    except tf.errors.ResourceExhaustedError as error:
        error.add_note(_out_of_memory(self))
        raise
    finally:
        for callback in callbacks:
            if isinstance(callback, (Checkpointer, GradientNoise, VerifyModelSync)):
                callback.detach()


def _out_of_memory(model) -> str:
    """What a user can do about it."""
    parameters = parameter_bytes(model)
    strategy = strategy_of(model)
    ranks = 1 if strategy is None else strategy.gradient_group.size
    stage = 0 if strategy is None else strategy.zero_stage
    return (
        f"Out of memory: the parameters take {parameters / 2**20:,.0f} MiB, their gradients as much "
        "again, and so does each moment that the optimizer keeps. `zero_stage=3` of the strategy "
        f"gives each of the {ranks} data parallel ranks a part of all three (now "
        f"zero_stage={stage}); `tfdist.recompute.recompute` and smaller batches take fewer bytes of "
        "activations. `tfdist.monitoring.memory_report(model)` has the figures."
    )


def _adopt_optimizers(model, strategy) -> None:
    """Lets optimizers that were made outside of the scope make their variables inside.

    An optimizer notes the strategy that it was made under. One process has one set of variables
    here, so there is nothing that a scope would have changed.
    """
    for value in (model.optimizer, *vars(model).values()):
        while isinstance(value, keras.optimizers.Optimizer):
            value._distribution_strategy = strategy
            value = getattr(value, "inner_optimizer", None)


def _evaluate(self, *args, original, **kwargs):
    _before_reading(self)
    strategy = _parallel_strategy(self)
    if strategy is None:
        with global_parameters(self):
            return original(self, *args, **kwargs)
    _refuse_xla(self, strategy)
    arguments = _arguments(original, self, *args, **kwargs)
    # Inside `fit` the callbacks are those of `fit`, prepared there.
    inside_fit = isinstance(arguments["callbacks"], keras.callbacks.CallbackList)
    if not inside_fit:
        check_agreement(strategy, "evaluate", arguments)
    synchronize_layer_states(self)
    if not inside_fit:
        _prepare_callbacks(strategy, arguments, training=False)
    with global_parameters(self):
        return original(**arguments)


def _before_reading(model) -> None:
    strategy = asynchronous_strategy_of(model)
    if strategy is not None:
        strategy.before_reading(model)


def _predict(self, *args, original, **kwargs):
    _before_reading(self)
    strategy = _parallel_strategy(self)
    if strategy is None:
        with global_parameters(self):
            return original(self, *args, **kwargs)
    arguments = _arguments(original, self, *args, **kwargs)
    check_agreement(strategy, "predict", arguments)
    synchronize_layer_states(self)
    _prepare_callbacks(strategy, arguments, training=False)
    with strategy.extended.predicting(), global_parameters(self):
        return original(**arguments)


def _predict_on_batch(self, x, *, original):
    if _parallel_strategy(self) is None:
        return original(self, x)
    rows = _first(x).shape[0]
    return self.predict(x, batch_size=rows, verbose=0)


def _train_on_batch(self, x, y=None, sample_weight=None, *args, original, **kwargs):
    strategy = strategy_of(self)
    if strategy is not None:
        _adopt_optimizers(self, strategy)
    x, y, sample_weight = _own_rows(self, (x, y, sample_weight))
    return original(self, x, y, sample_weight, *args, **kwargs)


def _test_on_batch(self, x, y=None, sample_weight=None, *args, original, **kwargs):
    x, y, sample_weight = _own_rows(self, (x, y, sample_weight))
    with global_parameters(self):
        return original(self, x, y, sample_weight, *args, **kwargs)


def _own_rows(model, batch):
    """This rank's rows and tokens of a batch; all rows on all ranks where they do not divide.

    Both give the single process's update. A graph is made for the shapes that it is given, and
    takes those to be the same on all ranks, so rows are never split unevenly here.
    """
    strategy = _parallel_strategy(model)
    if strategy is None:
        return batch
    _refuse_xla(model, strategy)
    strategy.extended.batch_logs_read.assign(True)
    group = strategy.row_group
    rows = _first(batch).shape[0]
    own = batch
    if rows % group.size == 0:
        start, end = row_range(rows, group.size, group.rank)
        own = tf.nest.map_structure(lambda part: None if part is None else part[start:end], batch)
    tokens = strategy.token_group
    return own if tokens.size == 1 else own_tokens(own, tokens.size, tokens.rank, even=True)


def _first(batch):
    """The first part of a batch that is there: optional inputs may be None."""
    return next(part for part in tf.nest.flatten(batch) if part is not None)


def _maybe_symbolic_build(self, iterator=None, data_batch=None, *, original):
    """Builds the model from the specification of a batch, where Keras would take a batch.

    Keras draws it from the data set, and only under a strategy: a data set that shuffles anew each
    time would yield another order than without one. What cannot be built so makes its variables in
    the first step, as it does without a strategy: a model without `call`, as that of a GAN often is,
    or one whose steps take data of a form of their own.
    """
    strategy = strategy_of(self)
    if strategy is None:
        if iterator is not None and asynchronous_strategy_of(self) is not None:
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
        # What is wrong with the model itself the first step says again.
        _logger.info("%s makes its variables in the first step: %s", self.name, error)
        return None


def _prepare_callbacks(strategy, arguments: dict, *, training: bool) -> None:
    """Sets the callbacks and the verbosity of this rank, and what of the logs is reduced."""
    given = arguments["callbacks"]
    given = list(tf.nest.flatten(given)) if given is not None else []
    check_callbacks(given, arguments["self"])
    wanted = reads_batch_logs(given) or arguments["verbose"] in (1, "auto")
    anywhere = all_reduce(tf.constant(wanted), strategy.group(), "max", name="reads-batch-logs")
    strategy.extended.batch_logs_read.assign(anywhere)
    arguments["callbacks"] = callbacks_of_rank(given, strategy, training=training)
    if not strategy.is_chief:
        arguments["verbose"] = 0


PATCHES = (
    Patch(TensorFlowTrainer, "fit", ("self", "x", "y"), _fit),
    Patch(TensorFlowTrainer, "evaluate", ("self", "x", "y"), _evaluate),
    Patch(TensorFlowTrainer, "predict", ("self", "x"), _predict),
    Patch(
        TensorFlowTrainer,
        "_maybe_symbolic_build",
        ("self", "iterator", "data_batch"),
        _maybe_symbolic_build,
    ),
    Patch(TensorFlowTrainer, "predict_on_batch", ("self", "x"), _predict_on_batch),
    Patch(
        TensorFlowTrainer, "train_on_batch", ("self", "x", "y", "sample_weight"), _train_on_batch
    ),
    Patch(TensorFlowTrainer, "test_on_batch", ("self", "x", "y", "sample_weight"), _test_on_batch),
)
