"""SlowMo: local SGD with a slow momentum over the syncs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.addons.slow_links.local_sgd.local import LocalOptimizer
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class SlowMo(LocalOptimizer):
    """Local SGD with slow momentum: an outer step towards the average of parameters replaces it.

    With the learning rate r of the inner optimizer, global parameters x, and the average d over ranks of
    their differences from the local parameters:

        u = slow_momentum * u + d / r
        x = x - slow_learning_rate * r * u

    `slow_momentum=0` and `slow_learning_rate=1` is `LocalSGD`.

    Source: Wang, Tantia, Ballas and Rabbat 2019, "SlowMo: Improving Communication-Efficient
    Distributed SGD with Slow Momentum", arXiv:1910.00643. Each rank keeps its own state of the inner
    optimizer, as in section 2 under "maintain".

    Args:
        inner: The optimizer of the local steps, or its name.
        sync_every: The number of steps from one sync to the next.
        slow_momentum: The momentum; 0.4 to 0.8 in the paper.
        slow_learning_rate: The learning rate of the outer step.
        within: As in `LocalSGD`.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is not an optimizer.
        ValueError: An argument is out of range, or `inner` is not supported.
    """

    outer_slots = ("slow_momentum",)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str,
        sync_every: int,
        *,
        slow_momentum: float = 0.7,
        slow_learning_rate: float = 1.0,
        within: str | None = None,
        name: str | None = None,
    ):
        checks.number("slow_momentum", slow_momentum, minimum=0, below=1)
        checks.number("slow_learning_rate", slow_learning_rate, above=0)
        super().__init__(inner, sync_every, within=within, name=name)
        self.slow_momentum, self.slow_learning_rate = slow_momentum, slow_learning_rate

    def shared_scalars(self):
        """The inner learning rate; on a rank that has skipped a step, its schedule may lag behind."""
        return [tf.cast(tf.convert_to_tensor(self.learning_rate), tf.float32)]

    def outer_step(self, values, delta, slots, shared):
        """See the class."""
        rate = tf.cast(shared[0], values.dtype)
        (momentum,) = slots
        momentum.assign(
            self.slow_momentum * tf.convert_to_tensor(momentum.value)
            + tf.math.divide_no_nan(delta, rate)
        )
        return values - self.slow_learning_rate * rate * tf.convert_to_tensor(momentum.value)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            **super().get_config(),
            "slow_momentum": self.slow_momentum,
            "slow_learning_rate": self.slow_learning_rate,
        }
