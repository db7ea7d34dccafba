"""DiLoCo: many local steps, and an outer SGD with Nesterov momentum on what they have moved."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import checks
from tfdist.optimizers.local import LocalOptimizer

__all__ = ["DiLoCo"]


@keras.saving.register_keras_serializable(package="tfdist")
class DiLoCo(LocalOptimizer):
    """Distributed low-communication training.

    With global parameters x, and the average d of what ranks have moved away from them:

        m = outer_momentum * m + d
        x = x - outer_learning_rate * (d + outer_momentum * m)      nesterov=True
        x = x - outer_learning_rate * m                             nesterov=False

    `outer_learning_rate=1` and `outer_momentum=0` is `LocalSGD`.

    ```python
    inner = keras.optimizers.AdamW(4e-4, weight_decay=0.1)
    with strategy.scope():
        model.compile(tfdist.optimizers.DiLoCo(inner, sync_every=500), loss)
    model.fit(...)
    ```

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv:2311.08105.

    Args:
        inner: The optimizer of the local steps, or its name; AdamW in the paper.
        sync_every: The number of steps from one sync to the next; 500 in the paper.
        outer_learning_rate: The learning rate of the outer step.
        outer_momentum: Its momentum.
        nesterov: Whether it is Nesterov's.
        within: As in `LocalSGD`.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is no optimizer.
        ValueError: An argument is out of its range, or `inner` cannot be used so.
    """

    outer_slots = ("outer_momentum",)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str,
        sync_every: int,
        *,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        within: str | None = None,
        name: str | None = None,
    ):
        checks.number("outer_learning_rate", outer_learning_rate, above=0)
        checks.number("outer_momentum", outer_momentum, minimum=0, below=1)
        checks.boolean("nesterov", nesterov)
        super().__init__(inner, sync_every, within=within, name=name)
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
        self.nesterov = nesterov

    def outer_step(self, values, delta, slots, shared):
        """See the class."""
        (momentum,) = slots
        momentum.assign(self.outer_momentum * tf.convert_to_tensor(momentum.value) + delta)
        step = tf.convert_to_tensor(momentum.value)
        if self.nesterov:
            step = delta + self.outer_momentum * step
        return values - self.outer_learning_rate * step

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            **super().get_config(),
            "outer_learning_rate": self.outer_learning_rate,
            "outer_momentum": self.outer_momentum,
            "nesterov": self.nesterov,
        }
