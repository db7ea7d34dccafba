"""Horovod's Keras callbacks for Keras 3: same names, same arguments, no Horovod needed.

A script that comes from Horovod changes `hvd.callbacks` to `tfdist.compat.horovod` and makes its model
under a strategy, whose `num_replicas_in_sync` takes the place of `hvd.size()`. A script that is
new needs none of these: a tfdist strategy starts all ranks from the same weights and hands global
metrics to callbacks, and `tfdist.learning_rate.ScaledWarmup` warms the rate up.

Under a strategy of TensorFlow's own, `BroadcastGlobalVariablesCallback` and
`MetricAverageCallback` do nothing, and the others work as everywhere.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdist import checks
from tfdist.collectives import all_gather, all_reduce, broadcast
from tfdist.collectives.engine import Engine
from tfdist.keras_internals.attributes import momentums

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

#: For the dtypes of variables that the engines cannot move: one of the same width that they can.
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64}


class _LearningRateCallback(keras.callbacks.Callback):
    """Sets the rate to `initial_lr * self._multiplier(epoch)` within a range of epochs."""

    def __init__(
        self, initial_lr, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
    ):
        super().__init__()
        self.initial_lr = float(checks.number("initial_lr", initial_lr, above=0))
        checks.boolean("momentum_correction", momentum_correction)
        steps_per_epoch = checks.integer(
            "steps_per_epoch", steps_per_epoch, minimum=1, optional=True, also="None to ask Keras"
        )
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        # 0: unknown, which only a staircase can do with.
        self._steps = 0
        self._epoch = 0

    def _multiplier(self, epoch: float) -> float:
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        """Checks that the optimizer can be steered, and learns the number of steps."""
        _rate_of(self.model.optimizer, type(self).__name__)
        if self.momentum_correction:
            _velocities_of(self.model.optimizer, type(self).__name__)
        self._steps = int(self.steps_per_epoch or (self.params or {}).get("steps") or 0)
        if not self.staircase and self.end_epoch != 0 and not self._steps:
            raise ValueError(
                f"{type(self).__name__} sets the rate at every step, and this data set does not "
                "tell how many there are in an epoch. Pass steps_per_epoch to it. "
                f"Received: steps_per_epoch={self.steps_per_epoch!r}."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Remembers the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Sets the rate of the steps that begin."""
        if not self._in_range(self._epoch):
            return
        if not self.staircase:
            self._set_rate(self._multiplier(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set_rate(self._multiplier(self._epoch))

    def on_epoch_end(self, epoch, logs=None):
        """Adds the rate to the logs, as `lr`."""
        if logs is not None:
            logs["lr"] = _read(_rate_of(self.model.optimizer, type(self).__name__))

    def _in_range(self, epoch: int) -> bool:
        return self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def _set_rate(self, multiplier: float) -> None:
        name = type(self).__name__
        rate = _rate_of(self.model.optimizer, name)
        old = _read(rate)
        rate.assign(self.initial_lr * float(multiplier))
        # Read back: in the rate's own precision, 1.0 says that nothing changed. A velocity that
        # a rate of zero made has nothing left in it to correct.
        ratio = _read(rate) / old if old else 1.0
        if self.momentum_correction and ratio != 1.0:
            for velocity in _velocities_of(self.model.optimizer, name):
                velocity.assign(velocity * ratio)


class LearningRateScheduleCallback(_LearningRateCallback):
    """Sets the learning rate to `initial_lr * multiplier` from one epoch to another.

    The optimizer has a float learning rate, which the callback assigns before the step. The rate
    in force at the end of an epoch is in that epoch's logs as `lr`.

    Momentum correction (Goyal et al. 2017, arXiv:1706.02677, section 3, remark 2): the velocity of
    `keras.optimizers.SGD` and `RMSprop` has the learning rate inside, so when the rate changes, the
    old velocity is brought to the new rate. Horovod multiplies the optimizer's `momentum` by
    new / old rate for one step. In Keras 3 `momentum` is a Python float that a compiled train step
    no longer reads, so the velocity variables are multiplied instead, once: `(m * r) * v` and
    `m * (r * v)` are the same update, compiled or not. With `nesterov=True` it is the paper's
    update still, while Horovod's also scales the look-ahead of that one step. Optimizers without
    momentum, or with one that does not hold the rate (Adam, Muon), need no correction.

    Args:
        initial_lr: The learning rate that `multiplier` multiplies, in most scripts that of the
            optimizer.
        multiplier: A function from the epoch to a number; or a number, which stands for the decay
            `multiplier ** (epoch - start_epoch)`.
        start_epoch: The first epoch in which the rate is set, counted from 0.
        end_epoch: The first epoch in which it no longer is; None for no end. The last rate stays.
        staircase: True sets the rate in the first step of an epoch, from an integer epoch; False
            sets it in every step, from `epoch + batch / steps_per_epoch`. Keras calls callbacks
            once per `steps_per_execution` steps, so the rate stays during these.
        momentum_correction: Whether to correct the velocity, as above.
        steps_per_epoch: The steps of an epoch. None takes what Keras knows of the data set, and
            is needed with `staircase=False` only.

    Raises:
        ValueError: An argument has no meaning. When training begins: the optimizer has no
            assignable learning rate, has a momentum that the correction does not know, or the
            number of steps is unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        start_epoch = checks.integer("start_epoch", start_epoch, minimum=0)
        end_epoch = checks.integer("end_epoch", end_epoch, optional=True)
        checks.boolean("staircase", staircase)
        if end_epoch is not None and end_epoch <= start_epoch:
            raise ValueError(
                "The rate is set in epochs from `start_epoch` up to, not including, `end_epoch`. "
                f"Received: start_epoch={start_epoch}, end_epoch={end_epoch}, which holds none."
            )
        super().__init__(
            initial_lr, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
        )
        if not callable(multiplier):
            checks.number("multiplier", multiplier, minimum=0, also="a function of the epoch")
        self.multiplier = multiplier

    def _multiplier(self, epoch: float) -> float:
        if callable(self.multiplier):
            return self.multiplier(epoch)
        return self.multiplier ** (epoch - self.start_epoch)


class LearningRateWarmupCallback(_LearningRateCallback):
    """Raises the learning rate from `initial_lr / replicas` to `initial_lr`, step by step.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2), by Horovod's formula:

        initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)

    where `size` is `strategy.num_replicas_in_sync` of the model's strategy and `epoch` is
    `epoch + (batch + 1) / steps_per_epoch`, so that the last step of the warm-up has the full rate.
    Where Keras runs several steps per call, or the data ends early, the rate is set to
    `initial_lr` at the end of the last epoch of the warm-up; `warmup_epochs` may be a fraction,
    past which the rate stays. (Horovod's would stop short in the first case and overshoot in the
    second.)

    Args:
        initial_lr: The rate at the end: the one that is already scaled for all replicas, as in
            `keras.optimizers.SGD(0.1 * strategy.num_replicas_in_sync)`.
        warmup_epochs: How many epochs it takes; 0 leaves the rate alone.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: The steps of an epoch; None takes what Keras knows of the data set.
        verbose: 1 prints a line on the first rank when the warm-up is over.

    Raises:
        ValueError: As for `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        warmup_epochs = checks.number(
            "warmup_epochs", warmup_epochs, minimum=0, maximum=checks.LARGEST
        )
        verbose = checks.integer("verbose", verbose, minimum=0, maximum=2)
        super().__init__(initial_lr, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose
        self._replicas = 1

    def on_train_begin(self, logs=None):
        """Checks the optimizer, and learns the numbers of steps and of replicas."""
        super().on_train_begin(logs)
        self._replicas = self.model.distribute_strategy.num_replicas_in_sync

    def on_epoch_end(self, epoch, logs=None):
        """Ends the warm-up where its last epoch ends, and adds the rate to the logs, as `lr`."""
        last = math.ceil(self.warmup_epochs) - 1
        if epoch == last:
            self._set_rate(1.0)
        super().on_epoch_end(epoch, logs)
        engine = _engine_of(self.model)
        if epoch == last and self.verbose > 0 and (engine is None or engine.rank == 0):
            print(
                f"\nEpoch {epoch + 1}: the warm-up is over; the learning rate is "
                f"{self.initial_lr:g}."
            )

    def _multiplier(self, epoch: float) -> float:
        warm = min((epoch + 1 / self._steps) / self.warmup_epochs, 1.0)
        return (1 + (self._replicas - 1) * warm) / self._replicas


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer state of one, when training first begins.

    For weights that one rank alone has loaded. In the list of callbacks it stands after those that
    restore, such as `keras.callbacks.BackupAndRestore`.

    Every variable of the model (seeds of dropout and counters included) and of its optimizer is
    broadcast, whatever its dtype, along the data axis of the mesh: with tensor or pipeline
    parallelism the whole replica that `root_rank` belongs to is copied, each rank giving its own
    slices to those that hold the same ones.

    Horovod's `device` and `local_variables` have no counterpart.

    Args:
        root_rank: The rank in the world whose variables all take.

    Raises:
        ValueError: When training begins: `root_rank` is not in the world, the model or the
            optimizer has no variables yet, or ZeRO has split them over the data axis.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank: int = checks.integer("root_rank", root_rank, minimum=0)
        self._done: bool = False

    def on_train_begin(self, logs=None):
        """Broadcasts, the first time."""
        engine = _engine_of(self.model)
        if self._done or engine is None:
            return
        if not 0 <= self.root_rank < engine.size:
            raise ValueError(
                f"`root_rank` is a rank of the world, in [0, {engine.size}). "
                f"Received: root_rank={self.root_rank}."
            )
        stage = getattr(self.model.distribute_strategy, "zero_stage", 0)
        if stage:
            raise ValueError(
                f"ZeRO stage {stage} keeps different slices on the ranks of the data axis, which "
                "a broadcast would overwrite. Leave BroadcastGlobalVariablesCallback out: the "
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

    Floats are replaced by their mean over the world; other values stay. The logs of a
    tfdist strategy are global already, and the mean of equal numbers is that number, so the
    callback serves logs that a script's own callbacks add on each rank.

    Horovod's `device` has no counterpart.

    Raises:
        ValueError: At the end of an epoch, on every rank: the ranks' logs differ in their keys.
    """

    def on_epoch_end(self, epoch, logs=None):
        """Averages the logs in place."""
        engine = _engine_of(self.model)
        if engine is None:
            return
        logs = {} if logs is None else logs
        keys = sorted(key for key, value in logs.items() if _is_float(value))
        group = engine.group()
        # Without this check vectors of different keys would be added up, or never meet.
        fingerprint = zlib.crc32("\n".join(keys).encode())
        found = all_gather(tf.constant([fingerprint], tf.int64), group, name="metric-average/keys")
        others = [
            rank
            for rank, theirs in zip(group.ranks, found.numpy(), strict=True)
            if theirs != fingerprint
        ]
        if others:
            raise ValueError(
                "MetricAverageCallback averages logs that all ranks have. Received on rank "
                f"{engine.rank}: {keys}; other keys on ranks {others}. Add the missing logs "
                "there, or put the callback that adds them after this one."
            )
        values = tf.constant([float(logs[key]) for key in keys], tf.float64)
        means = all_reduce(values, group, "mean", name="metric-average").numpy()
        logs.update(zip(keys, means.tolist(), strict=True))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that keeps only the best model.

    Unlike Horovod's, whose estimators fill the path in later, it takes the path at once. Under a
    tfdist strategy it goes into the list of callbacks on every rank, and the chief alone writes.

    Args:
        filepath: Where to write: a path that ends in `.keras`, or in `.weights.h5` with
            `save_weights_only`.
        monitor: The name of the log that says which model is best.
        verbose: 1 prints a line at each save.
        save_weights_only: Whether to leave out the architecture and the optimizer.
        mode: "min", "max", or "auto" to guess from the name of the log.
        save_freq: "epoch", or a number of batches.
        initial_value_threshold: What the first saved model has to beat, or None.

    Raises:
        ValueError: As for `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        filepath,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ):
        filepath = checks.path("filepath", filepath)
        checks.boolean("save_weights_only", save_weights_only)
        ending = ".weights.h5" if save_weights_only else ".keras"
        if not filepath.endswith(ending):
            raise checks.refuse("filepath", filepath, f"a path that ends in {ending!r}")
        checks.text("monitor", monitor)
        checks.integer("verbose", verbose, minimum=0, maximum=2)
        checks.one_of("mode", mode, ("auto", "min", "max"))
        if save_freq != "epoch":
            checks.integer("save_freq", save_freq, minimum=1, also="'epoch'")
        checks.number("initial_value_threshold", initial_value_threshold, optional=True)
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )


def _engine_of(model: keras.Model) -> Engine | None:
    """The engine under a model, or None under a strategy of TensorFlow's own."""
    return getattr(model.distribute_strategy, "engine", None)


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of its optimizer, each once, in the same order on all ranks."""
    optimizer = model.optimizer
    unbuilt = "model" if not model.built else None
    if unbuilt is None and optimizer is not None and not optimizer.built:
        unbuilt = "optimizer"
    if unbuilt:
        raise ValueError(
            f"The {unbuilt} has no variables to broadcast yet: it is not built. Make the model "
            "under `strategy.scope()`, where `fit` builds it before training, or build it first."
        )
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    return list({id(variable): variable for variable in variables}.values())


def _rate_of(optimizer, callback: str) -> keras.Variable:
    """The variable that holds the learning rate."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"{callback} steers one learning rate. Received: a MultiOptimizer, which has one for "
            "each of its optimizers. Give these schedules instead, such as "
            "tfdist.learning_rate.ScaledWarmup."
        )
    rate = optimizer.learning_rate
    if not isinstance(rate, keras.Variable):
        raise ValueError(
            f"{callback} assigns the learning rate, so the optimizer is made with a float. "
            f"Received: {type(optimizer).__name__} with a schedule or a function. Give it a "
            "float, or leave the callback out and use "
            "tfdist.learning_rate.ScaledWarmup, which warms up a schedule."
        )
    return rate


def _velocities_of(optimizer, callback: str) -> list[keras.Variable]:
    """The variables in which old gradients are kept, multiplied by the rates of their steps."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    momentum = getattr(optimizer, "momentum", None)
    if momentum is None or (_is_number(momentum) and momentum == 0):
        return []
    if isinstance(optimizer, keras.optimizers.Muon):
        # Keeps plain gradients; the rate multiplies them in the step.
        return []
    # Both make these variables when they are built.
    if isinstance(optimizer, keras.optimizers.SGD):
        velocities = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        velocities = momentums(optimizer, [])
    else:
        raise ValueError(
            f"{callback} corrects the momentum of keras.optimizers.SGD and RMSprop, and does not "
            f"know how {type(optimizer).__name__} keeps its own. Received: "
            f"momentum_correction=True, momentum={momentum!r}. Pass momentum_correction=False."
        )
    return [velocity for velocity in velocities if velocity is not None]


def _read(rate: keras.Variable) -> float:
    return float(keras.ops.convert_to_numpy(rate))


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_float(value) -> bool:
    value = np.asarray(value)
    return value.ndim == 0 and np.issubdtype(value.dtype, np.floating)
