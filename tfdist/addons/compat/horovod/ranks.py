"""Callbacks that communicate: variables when training begins, and logs at the end of an epoch."""

from __future__ import annotations

import zlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import all_gather, all_reduce, broadcast
from tfdist.collectives.engine import Engine
from tfdist.utils import checks

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback", "engine_of"]

#: For dtypes of variables that the engines do not support: a supported one of the same width.
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64}


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and the optimizer state of one rank, when training first begins.

    For weights that only one rank has loaded. In the list of callbacks it must come after those that
    restore, such as `keras.callbacks.BackupAndRestore`.

    Every variable of the model (seeds of dropout and counters included) and of its optimizer is
    broadcast, whatever its dtype, along the data axis of the mesh: with tensor or pipeline
    parallelism the whole replica of `root_rank` is copied, and each of its ranks sends its slices to
    those that have the same ones.

    Horovod's `device` and `local_variables` have no counterpart.

    Args:
        root_rank: The rank in the world whose variables are broadcast.

    Raises:
        ValueError: When training begins: `root_rank` is not in the world, the model or the
            optimizer has no variables yet, or ZeRO has sharded them over the data axis.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank: int = checks.integer("root_rank", root_rank, minimum=0)
        self._done: bool = False

    def on_train_begin(self, logs=None):
        """Broadcasts the variables once."""
        engine = engine_of(self.model)
        if self._done or engine is None:
            return
        if not 0 <= self.root_rank < engine.size:
            raise ValueError(
                f"`root_rank` must be a rank of the world, in [0, {engine.size}). "
                f"Received: root_rank={self.root_rank}."
            )
        stage = getattr(self.model.distribute_strategy, "zero_stage", 0)
        if stage:
            raise ValueError(
                "BroadcastGlobalVariablesCallback is not supported with ZeRO: a broadcast would overwrite "
                f"the different shards of ranks. Received: zero_stage={stage}. Remove the callback: the "
                "strategy starts all ranks from the same weights."
            )
        axes = engine.mesh.gradient_axes
        group = engine.group(*axes)
        place = engine.mesh.coordinates(self.root_rank)
        root = group.ranks.index(engine.mesh.rank_at({axis: place[axis] for axis in axes}))
        for variable in _variables_of(self.model):
            value = tf.convert_to_tensor(variable.value)
            wire = _SAME_BITS.get(value.dtype)
            moved = value if wire is None else tf.bitcast(value, wire)
            moved = broadcast(moved, group, root, name=variable.path)
            variable.assign(moved if wire is None else tf.bitcast(moved, value.dtype))
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the logs of an epoch over all ranks, for the callbacks after it in the list.

    Floats are replaced by their mean over the world; other values are kept. The logs of a
    tfdist strategy are global already, and averaging does not change them, so the callback is useful
    for logs that a script's own callbacks add on each rank.

    Horovod's `device` has no counterpart.

    Raises:
        ValueError: At the end of an epoch, on every rank: the ranks' logs differ in their keys.
    """

    def on_epoch_end(self, epoch, logs=None):
        """Averages the logs in place."""
        engine = engine_of(self.model)
        if engine is None:
            return
        logs = {} if logs is None else logs
        keys = sorted(key for key, value in logs.items() if _is_float(value))
        group = engine.group()
        # Without this check vectors of different keys would be summed, or the ranks would deadlock.
        fingerprint = zlib.crc32("\n".join(keys).encode())
        found = all_gather(tf.constant([fingerprint], tf.int64), group, name="metric-average/keys")
        others = [
            rank
            for rank, theirs in zip(group.ranks, found.numpy(), strict=True)
            if theirs != fingerprint
        ]
        if others:
            raise ValueError(
                "MetricAverageCallback requires the same logs on all ranks. Received on rank "
                f"{engine.rank}: {keys}; other keys on ranks {others}. Add the missing logs "
                "there, or put the callback that adds them after this one."
            )
        values = tf.constant([float(logs[key]) for key in keys], tf.float64)
        means = all_reduce(values, group, "mean", name="metric-average").numpy()
        logs.update(zip(keys, means.tolist(), strict=True))


def engine_of(model: keras.Model) -> Engine | None:
    """The engine of a model's strategy, or None under TensorFlow's own strategies."""
    return getattr(model.distribute_strategy, "engine", None)


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of its optimizer, each once, in the same order on all ranks."""
    optimizer = model.optimizer
    unbuilt = "model" if not model.built else None
    if unbuilt is None and optimizer is not None and not optimizer.built:
        unbuilt = "optimizer"
    if unbuilt:
        raise ValueError(
            f"The {unbuilt} must be built before its variables are broadcast. Create the model "
            "under `strategy.scope()`, where `fit` builds it before training, or build it first."
        )
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    return list({id(variable): variable for variable in variables}.values())


def _is_float(value) -> bool:
    value = np.asarray(value)
    return value.ndim == 0 and np.issubdtype(value.dtype, np.floating)
