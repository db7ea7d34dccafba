"""Scaling of the learning rate with the global batch, and gradual warm-up."""

from __future__ import annotations

import math

import keras
from keras.optimizers import schedules

from tfdist.utils import checks

__all__ = ["ScaledWarmup", "scaled_learning_rate"]

_RULES = ("linear", "sqrt", "none")


def scaled_learning_rate(learning_rate: float, replicas: int, rule: str = "linear") -> float:
    """Scales the learning rate of one process for a global batch of `replicas` times its size.

    ```pycon
    >>> scaled_learning_rate(0.1, replicas=8)
    0.8
    ```

    Args:
        learning_rate: The rate that was tuned on one process, with one replica's batch.
        replicas: The number of replicas whose gradients make one update, each with a batch of
            that size: `strategy.num_replicas_in_sync`.
        rule: "linear" multiplies by `replicas` (Goyal et al. 2017, arXiv:1706.02677, section 2.1;
            for SGD). "sqrt" multiplies by its square root, which keeps the variance of the update
            (Krizhevsky 2014, arXiv:1404.5997; for Adam and similar optimizers Malladi et al. 2022,
            arXiv:2205.10287). "none" does not change the rate.

    Returns:
        The rate for the global batch.

    Raises:
        ValueError: The rate or `replicas` is not positive, or the rule is unknown.
    """
    return float(checks.number("learning_rate", learning_rate, above=0)) * _scale(replicas, rule)


@keras.saving.register_keras_serializable(package="tfdist")
class ScaledWarmup(schedules.LearningRateSchedule):
    """Gradual warm-up from the rate of one process to the scaled rate of all replicas.

    With a large batch and the full scaled rate training may diverge in the first steps, while the weights
    change fast; so the rate starts at that of one process and grows by an equal amount every step
    (Goyal et al. 2017, arXiv:1706.02677, section 2.2):

        rate(step) = learning_rate * (1 + (scale - 1) * min(step / warmup_steps, 1))

    where `scale` is `replicas`, its square root, or 1, by the rule. With the linear rule this is
    Horovod's warm-up, `initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`, with
    `initial_lr = size * learning_rate` and fractional epochs counted in steps.

    ```python
    optimizer = keras.optimizers.SGD(
        ScaledWarmup(
            learning_rate=keras.optimizers.schedules.CosineDecay(0.1, decay_steps=10_000),
            replicas=strategy.num_replicas_in_sync,
            warmup_steps=500,
        ),
        momentum=0.9,
    )
    ```

    The number of replicas is part of the configuration: an optimizer that is saved and loaded on another
    number of ranks keeps its rates. A `.keras` file with such an optimizer requires tfdist to load, or
    `keras.models.load_model(path, compile=False)`.

    Args:
        learning_rate: The rate of one process: a float, or a schedule, whose value at each step
            (counted from 0, warm-up included) is multiplied by the same factor.
        replicas: As for `scaled_learning_rate`.
        rule: "linear", "sqrt" or "none", as for `scaled_learning_rate`.
        warmup_steps: The number of optimizer steps until the full scale; 0 for no warm-up. One step is one
            update by `optimizer.apply`; with `gradient_accumulation_steps` Keras counts each accumulated
            batch as a step.
        name: The name of the operation. Defaults to "ScaledWarmup".

    Raises:
        ValueError: The rate or `replicas` is not positive, `warmup_steps` is negative, or the
            rule is unknown.
    """

    def __init__(
        self,
        *,
        learning_rate: float | schedules.LearningRateSchedule,
        replicas: int,
        rule: str = "linear",
        warmup_steps: int = 0,
        name: str | None = None,
    ):
        if not isinstance(learning_rate, schedules.LearningRateSchedule):
            also = "a LearningRateSchedule"
            learning_rate = float(checks.number("learning_rate", learning_rate, above=0, also=also))
        checks.text("name", name, optional=True)
        self._scale = _scale(replicas, rule)
        self.learning_rate = learning_rate
        self.replicas = checks.integer("replicas", replicas, minimum=1)
        self.rule = rule
        self.warmup_steps = checks.integer("warmup_steps", warmup_steps, minimum=0)
        self.name = name or "ScaledWarmup"

    def __call__(self, step):
        """Computes the rate of a step.

        Args:
            step: The number of previous updates: a scalar integer tensor, variable or int.

        Returns:
            A scalar float32 tensor.
        """
        with keras.name_scope(self.name):
            rate = self.learning_rate
            if isinstance(rate, schedules.LearningRateSchedule):
                rate = rate(step)
            rate = keras.ops.cast(rate, "float32")
            if self.warmup_steps == 0:
                return rate * self._scale
            # The minimum of integers, because float32 cannot represent all integers above 2**24.
            warm = keras.ops.minimum(keras.ops.cast(step, "int64"), self.warmup_steps)
            fraction = keras.ops.cast(warm, "float32") / float(self.warmup_steps)
            return rate * (1.0 + (self._scale - 1.0) * fraction)

    def get_config(self) -> dict:
        """The constructor's arguments, with a nested schedule serialized."""
        rate = self.learning_rate
        if isinstance(rate, schedules.LearningRateSchedule):
            rate = schedules.serialize(rate)
        return {
            "learning_rate": rate,
            "replicas": self.replicas,
            "rule": self.rule,
            "warmup_steps": self.warmup_steps,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict) -> ScaledWarmup:
        """Creates the schedule from the result of `get_config`."""
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = schedules.deserialize(rate)
        return cls(**{**config, "learning_rate": rate})


def _scale(replicas: int, rule: str) -> float:
    """The ratio of the rate for all replicas to that of one process."""
    replicas = checks.integer("replicas", replicas, minimum=1)
    checks.one_of("rule", rule, _RULES)
    return {"linear": float(replicas), "sqrt": math.sqrt(replicas), "none": 1.0}[rule]
