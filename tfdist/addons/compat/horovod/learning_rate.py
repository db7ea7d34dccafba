"""Callbacks that set the learning rate: by a schedule, and in a warm-up."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import keras

from tfdist.addons.compat.horovod.ranks import engine_of
from tfdist.backend.keras.attributes import momentums
from tfdist.utils import checks

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


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
        # 0: unknown, which only a staircase supports.
        self._steps = 0
        self._epoch = 0

    def _multiplier(self, epoch: float) -> float:
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        """Checks that the rate can be set, and determines the number of steps."""
        _rate_of(self.model.optimizer, type(self).__name__)
        if self.momentum_correction:
            _velocities_of(self.model.optimizer, type(self).__name__)
        self._steps = int(self.steps_per_epoch or (self.params or {}).get("steps") or 0)
        if not self.staircase and self.end_epoch != 0 and not self._steps:
            raise ValueError(
                f"{type(self).__name__} requires the number of steps in an epoch, because it sets the rate "
                "at every step, and this dataset has no known length. "
                f"Received: steps_per_epoch={self.steps_per_epoch!r}. Pass steps_per_epoch."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Stores the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Sets the rate of the next steps."""
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
        # Read back, so that a change below the rate's precision gives 1.0. The velocity after a rate of
        # zero needs no correction.
        ratio = _read(rate) / old if old else 1.0
        if self.momentum_correction and ratio != 1.0:
            for velocity in _velocities_of(self.model.optimizer, name):
                velocity.assign(velocity * ratio)


class LearningRateScheduleCallback(_LearningRateCallback):
    """Sets the learning rate to `initial_lr * multiplier` from one epoch to another.

    The optimizer must have a float learning rate, which the callback assigns before the step. The rate
    at the end of an epoch is in that epoch's logs as `lr`.

    Momentum correction (Goyal et al. 2017, arXiv:1706.02677, section 3, remark 2): the velocity of
    `keras.optimizers.SGD` and `RMSprop` includes the learning rate, so when the rate changes, the
    old velocity is scaled to the new rate. Horovod multiplies the optimizer's `momentum` by
    new / old rate for one step. In Keras 3 `momentum` is a Python float, which a compiled train step
    does not read again, so the velocity variables are multiplied instead, once: `(m * r) * v` and
    `m * (r * v)` are the same update, compiled or not. With `nesterov=True` it is still the paper's
    update, while Horovod's also scales the look-ahead of that one step. Optimizers without
    momentum, or whose momentum does not include the rate (Adam, Muon), need no correction.

    Args:
        initial_lr: The learning rate that `multiplier` multiplies, in most scripts that of the
            optimizer.
        multiplier: A function from the epoch to a number; or a number, which means the decay
            `multiplier ** (epoch - start_epoch)`.
        start_epoch: The first epoch in which the rate is set, counted from 0.
        end_epoch: The first epoch in which it is no longer set; None for no end. The last rate is kept.
        staircase: True sets the rate in the first step of an epoch, from an integer epoch; False
            sets it in every step, from `epoch + batch / steps_per_epoch`. Keras calls callbacks
            once per `steps_per_execution` steps, so the rate is constant during these.
        momentum_correction: Whether to correct the velocity, as above.
        steps_per_epoch: The steps of an epoch, used with `staircase=False` only. None uses the length
            of the dataset if Keras determines it.

    Raises:
        ValueError: An argument is out of range. When training begins: the optimizer has no
            assignable learning rate, has a momentum that the correction does not support, or the
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
                "`end_epoch` must be greater than `start_epoch`. "
                f"Received: start_epoch={start_epoch}, end_epoch={end_epoch}."
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
    If Keras runs several steps per call, or the data ends early, the rate is set to
    `initial_lr` at the end of the last epoch of the warm-up; `warmup_epochs` may be a fraction,
    after which the rate is constant. (Horovod's would stop short in the first case and overshoot in the
    second.)

    Args:
        initial_lr: The rate at the end: the one that is already scaled for all replicas, as in
            `keras.optimizers.SGD(0.1 * strategy.num_replicas_in_sync)`.
        warmup_epochs: The number of epochs of the warm-up; 0 does not change the rate.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: The steps of an epoch; None uses the length of the dataset.
        verbose: 1 prints a line on the first rank at the end of the warm-up.

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
        """Checks the optimizer, and determines the numbers of steps and of replicas."""
        super().on_train_begin(logs)
        self._replicas = self.model.distribute_strategy.num_replicas_in_sync

    def on_epoch_end(self, epoch, logs=None):
        """Ends the warm-up at the end of its last epoch, and adds the rate to the logs, as `lr`."""
        last = math.ceil(self.warmup_epochs) - 1
        if epoch == last:
            self._set_rate(1.0)
        super().on_epoch_end(epoch, logs)
        engine = engine_of(self.model)
        if epoch == last and self.verbose > 0 and (engine is None or engine.rank == 0):
            print(
                f"\nEpoch {epoch + 1}: finished the warm-up; the learning rate is "
                f"{self.initial_lr:g}."
            )

    def _multiplier(self, epoch: float) -> float:
        warm = min((epoch + 1 / self._steps) / self.warmup_epochs, 1.0)
        return (1 + (self._replicas - 1) * warm) / self._replicas


def _rate_of(optimizer, callback: str) -> keras.Variable:
    """The variable of the learning rate."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"{callback} requires an optimizer with one learning rate. Received: a MultiOptimizer, which "
            "has several. Use schedules for its optimizers instead, such as "
            "tfdist.learning_rate.ScaledWarmup."
        )
    rate = optimizer.learning_rate
    if not isinstance(rate, keras.Variable):
        raise ValueError(
            f"{callback} requires an optimizer with a float learning rate, which it assigns. "
            f"Received: {type(optimizer).__name__} with a schedule or a function. Use a "
            "float, or remove the callback and use "
            "tfdist.learning_rate.ScaledWarmup, which warms up a schedule."
        )
    return rate


def _velocities_of(optimizer, callback: str) -> list[keras.Variable]:
    """The variables with old gradients that are multiplied by the rates of their steps."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    momentum = getattr(optimizer, "momentum", None)
    if momentum is None or (_is_number(momentum) and momentum == 0):
        return []
    if isinstance(optimizer, keras.optimizers.Muon):
        # It keeps plain gradients; the rate multiplies them in the step.
        return []
    # Both create these variables when they are built.
    if isinstance(optimizer, keras.optimizers.SGD):
        velocities = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        velocities = momentums(optimizer, [])
    else:
        raise ValueError(
            f"{callback} does not support the momentum of {type(optimizer).__name__}, only that of "
            "keras.optimizers.SGD and RMSprop. Received: "
            f"momentum_correction=True, momentum={momentum!r}. Pass momentum_correction=False."
        )
    return [velocity for velocity in velocities if velocity is not None]


def _read(rate: keras.Variable) -> float:
    return float(keras.ops.convert_to_numpy(rate))


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
