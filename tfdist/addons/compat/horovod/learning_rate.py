"""Learning rates that a callback sets: by a schedule, and in a warm-up."""

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
        engine = engine_of(self.model)
        if epoch == last and self.verbose > 0 and (engine is None or engine.rank == 0):
            print(
                f"\nEpoch {epoch + 1}: the warm-up is over; the learning rate is "
                f"{self.initial_lr:g}."
            )

    def _multiplier(self, epoch: float) -> float:
        warm = min((epoch + 1 / self._steps) / self.warmup_epochs, 1.0)
        return (1 + (self._replicas - 1) * warm) / self._replicas


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
