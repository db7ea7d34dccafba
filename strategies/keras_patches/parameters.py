"""ZeRO-3: parameters are sharded when layers make them, and gathered when layers are called."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import (
    TFOptimizer,
)
from tfdist.sharding.layout import begin_layout
from tfdist.step.context import current_strategy
from tfdist.utils.lazy import require_addon


def _add_weight(self, *args, original, **kwargs):
    strategy = current_strategy()
    # A step that builds its layers makes them before it begins: a value that its graph makes later could
    # not be cut into shards.
    lifted = strategy is not None and strategy.zero_stage == 3
    with tf.init_scope() if lifted else contextlib.nullcontext():
        variable = original(self, *args, **kwargs)
        layout = begin_layout(variable)
        if strategy is not None:
            if "keras_hub" in sys.modules:
                require_addon("hub", "A model of KerasHub under a strategy").install_hub()
            group = strategy.group(*layout.gradient_axes(strategy.mesh))
            if strategy.zero_stage == 3 and variable.trainable and group.size > 1:
                _zero3().shard_variable(variable, group)
    return variable


def call_gathered(original, self, *args, **kwargs):
    """A call of a layer, around which ZeRO-3 gathers its parameters."""
    zero3 = _zero3()
    if zero3 is None:
        return original(self, *args, **kwargs)
    return zero3.call_gathered(original, self, *args, **kwargs)


def as_shards() -> contextlib.AbstractContextManager[None]:
    """Inside, parameters of ZeRO-3 are their shards: for optimizers, which work on those."""
    zero3 = _zero3()
    return contextlib.nullcontext() if zero3 is None else zero3.as_shards()


def _zero3() -> Any:
    """The module of sharded parameters; None until a strategy with `zero_stage=3` imports it."""
    return sys.modules.get("tfdist.zero.sharded_parameters")


def _with_shards(*args, original, **kwargs):
    """What takes `variable.value` for the memory of a variable, in methods that no gradient goes through."""
    with as_shards():
        return original(*args, **kwargs)


PATCHES = (
    Patch(keras.layers.Layer, "add_weight", ("self",), _add_weight),
    Patch(TFOptimizer, "_var_key", ("self", "variable"), _with_shards),
    Patch(
        keras.callbacks.SwapEMAWeights,
        "_apply_to_ema_optimizers",
        ("self", "tf_fn", "backend_fn"),
        _with_shards,
    ),
)
