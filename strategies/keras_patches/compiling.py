"""`jit_compile` of a model under a strategy: XLA compiles the parts of a step between collectives."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.framework import func_graph

from tfdist.backend.graph.compiling import compiling, is_compiled
from tfdist.backend.keras.attributes import Attribute
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TensorFlowTrainer, all_layers
from tfdist.step.context import DistributedStrategy, strategy_of
from tfdist.utils.temporary import attributes_set

if TYPE_CHECKING:
    from tfdist.backend.xla.obstacles import Obstacle

PATCHES = Patches()

_logger = logging.getLogger("tfdist")


class Automatic(int):
    """The value of a model's `jit_compile` if it was "auto", and the model is to be compiled."""


#: What a model was last warned of.
_warned_of = Attribute("_tfdist_uncompiled_operation")


@PATCHES.of(TensorFlowTrainer, "_resolve_auto_jit_compile", "self")
def _resolve_auto_jit_compile(self, *, original):
    """Compiles on GPUs also under a strategy, as Keras does without one."""
    if strategy_of(self) is None:
        return original(self)
    with attributes_set(self, _distribute_strategy=None):
        resolved = original(self)
    return Automatic(1) if resolved else resolved


@PATCHES.of(TensorFlowTrainer, "_make_function", "self", "step_function")
def _make_function(self, step_function, *, original):
    """Has `strategy.run` compile the step: XLA cannot compile collectives, which several ranks have."""
    strategy = strategy_of(self)
    for name in ("train_step", "test_step") if strategy is not None else ():
        if isinstance(getattr(self, name), tf.types.experimental.GenericFunction):
            raise ValueError(
                f"`{name}` must not be a tf.function: remove it. Received: that of `{self.name}`."
            )
    if strategy is None or not _divides(self, strategy):
        return original(self, step_function)
    with attributes_set(self, _jit_compile=False):
        return original(self, step_function)


def compiles(fn: Callable, strategy: DistributedStrategy) -> bool:
    """Whether a call of `strategy.run` is the step of a model that is to be compiled, during its trace."""
    model = getattr(fn, "__self__", None)
    return (
        isinstance(model, keras.Model)
        and bool(model.jit_compile)
        and not tf.executing_eagerly()
        and not is_compiled()
        and _divides(model, strategy)
    )


def _divides(model, strategy: DistributedStrategy) -> bool:
    """Whether the step of a compiled model may have operations that XLA cannot compile.

    One rank has no collectives: with `jit_compile=True` XLA compiles its step as a whole, as without a strategy.
    """
    return strategy.mesh.size > 1 or isinstance(model.jit_compile, Automatic)


def compiled(strategy: DistributedStrategy, fn: Callable, args: Sequence, kwargs, options):
    """Traces `strategy.run(fn, args, kwargs, options)`, and calls it with compiled parts in the current graph.

    Args:
        strategy: The strategy.
        fn: The step of a model.
        args: Its arguments.
        kwargs: Its keyword arguments.
        options: As in `tf.distribute.Strategy.run`.

    Raises:
        ValueError: XLA cannot compile an operation of the step, and the model was compiled with
            `jit_compile=True`.
    """
    from tfdist.backend.xla.emit import Compiler

    model: Any = getattr(fn, "__self__", None)
    flat = tf.nest.flatten((args, kwargs), expand_composites=True)
    places = [place for place, value in enumerate(flat) if tf.is_tensor(value)]

    def traced(*tensors):
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        own = tf.nest.pack_sequence_as((args, kwargs), values, expand_composites=True)
        with compiling():
            return strategy.run(fn, *own, options)

    given = [flat[place] for place in places]
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    graph = func_graph.func_graph_from_py_func(
        "compiled_step", traced, specs, {}, add_control_dependencies=True
    )
    compiler = Compiler(graph)
    outputs = iter(compiler.compile()(*given, *(outside for outside, _ in graph.captures)))
    _report(model, strategy, compiler.summary)
    structured = tf.nest.flatten(graph.structured_outputs, expand_composites=True)
    results = [next(outputs) if tf.is_tensor(each) else each for each in structured]
    return tf.nest.pack_sequence_as(graph.structured_outputs, results, expand_composites=True)


def _report(model, strategy: DistributedStrategy, summary) -> None:
    """Logs what was compiled, and raises or warns of what could not be."""
    if strategy.is_chief:
        _logger.info(
            "XLA compiles %d operations of a step of `%s` in %d parts (%d different ones); %d run between "
            "them.",
            summary.compiled,
            model.name,
            summary.islands,
            summary.distinct,
            summary.others,
        )
    if not summary.obstacles:
        return
    first, more = summary.obstacles[0], len(summary.obstacles) - 1
    found = f"{_layer_of(model, first)}{first}{f'; and {more} more' if more else ''}"
    if not isinstance(model.jit_compile, Automatic):
        raise ValueError(
            f"XLA cannot compile the step of `{model.name}`. Received: jit_compile=True, and {found}. Use "
            'jit_compile="auto", which leaves out such operations on GPUs, or False; or exclude them with '
            "`tf.xla.experimental.jit_scope(compile_ops=False)`."
        )
    is_new = _warned_of(model, None) != first
    _warned_of.set(model, first)
    if is_new and strategy.is_chief:
        _logger.warning("XLA does not compile a part of the step of `%s`: %s.", model.name, found)


def _layer_of(model, obstacle: Obstacle) -> str:
    """The layer that an operation belongs to, by the names in the operation's."""
    names = {layer.name for layer in all_layers(model, include_self=False)}
    for scope in reversed(obstacle.name.split("/")[:-1]):
        # Keras numbers the calls of a layer.
        for name in (scope, re.sub(r"_\d+$", "", scope)):
            if name in names:
                return f"the layer `{name}` with "
    return ""
