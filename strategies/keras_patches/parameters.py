"""ZeRO-3: parameters are sharded when layers make them, and gathered when layers are called."""

from __future__ import annotations

import contextlib
import sys

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import (
    TFOptimizer,
    get_keras_mask,
    in_stateless_scope,
    set_keras_mask,
)
from tfdist.sharding.layout import begin_layout
from tfdist.step.context import current_strategy
from tfdist.utils.lazy import require_addon
from tfdist.zero.sharded_variable import (
    ShardedVariable,
    as_shards,
    is_given,
    shard_variable,
)
from tfdist.zero.unshard import gathered


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
                shard_variable(variable, group)
    return variable


def call_gathered(original, self, *args, **kwargs):
    """The outermost layer that has parameters gathers them; a model leaves that to its layers."""
    if not ShardedVariable.exist or isinstance(self, keras.Model) or in_stateless_scope():
        return original(self, *args, **kwargs)
    sharded = [v for v in self.variables if isinstance(v, ShardedVariable) and not v.is_whole]
    inputs = [part for part in tf.nest.flatten((args, kwargs)) if tf.is_tensor(part)]
    if not sharded or all(map(is_given, sharded)) or not inputs:
        return original(self, *args, **kwargs)
    with gathered(self.path or self.name, sharded, inputs) as leave:
        outputs = original(self, *args, **kwargs)
    left = leave(outputs)
    for before, after in zip(tf.nest.flatten(outputs), tf.nest.flatten(left), strict=True):
        mask = get_keras_mask(before)
        if after is not before and mask is not None:
            set_keras_mask(after, mask)
    return left


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
