"""ZeRO-3: parameters are sharded when layers make them, and gathered when layers are called.

A strategy with `zero_stage=3` imports this module.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.private import get_keras_mask, in_stateless_scope, set_keras_mask
from tfdist.zero.sharded_variable import ShardedVariable, as_shards, is_given, shard_variable
from tfdist.zero.unshard import gathered

__all__ = ["as_shards", "call_gathered", "shard_variable"]


def call_gathered(original, self, *args, **kwargs):
    """Gathers the parameters of an outermost layer for a call; the layers of a model gather theirs."""
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
