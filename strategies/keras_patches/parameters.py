"""ZeRO-3: parameters are sharded when layers create them, and gathered when layers are called."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TFOptimizer
from tfdist.sharding.layout import begin_layout
from tfdist.step.context import current_strategy
from tfdist.utils.lazy import require_addon

PATCHES = Patches()


@PATCHES.of(keras.layers.Layer, "add_weight")
def _add_weight(self, *args, original, **kwargs):
    strategy = current_strategy()
    shards = strategy is not None and strategy.zero_stage == 3
    # Outside the graph of a step that builds its layers: initial values inside it could not be sharded.
    with tf.init_scope() if shards else contextlib.nullcontext():
        variable = original(self, *args, **kwargs)
        layout = begin_layout(variable)
        if strategy is not None:
            if "keras_hub" in sys.modules:
                require_addon("hub", "A model of KerasHub under a strategy").install_hub()
            group = strategy.group(*layout.gradient_axes(strategy.mesh))
            if shards and variable.trainable and group.size > 1:
                _zero3().shard_variable(variable, group)
    return variable


def call_gathered(original, self, *args, **kwargs):
    """Calls a layer; ZeRO-3 gathers its parameters for it."""
    zero3 = _zero3()
    if zero3 is None:
        return original(self, *args, **kwargs)
    return zero3.call_gathered(original, self, *args, **kwargs)


def as_shards() -> contextlib.AbstractContextManager[None]:
    """A context in which parameters of ZeRO-3 are their shards, for optimizers."""
    zero3 = _zero3()
    return contextlib.nullcontext() if zero3 is None else zero3.as_shards()


def _zero3() -> Any:
    """The module of ZeRO-3; None until a strategy with `zero_stage=3` imports it."""
    return sys.modules.get("tfdist.zero.unshard")


@PATCHES.of(TFOptimizer, "_var_key", "self", "variable")
@PATCHES.of(
    TFOptimizer, "_overwrite_model_variables_with_average_value", "self", "trainable_variables"
)
@PATCHES.of(
    keras.callbacks.SwapEMAWeights, "_apply_to_ema_optimizers", "self", "tf_fn", "backend_fn"
)
def _with_shards(*args, original, **kwargs):
    """For methods without gradients that expect `variable.value` to be the variable's memory."""
    with as_shards():
        return original(*args, **kwargs)
