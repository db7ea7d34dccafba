"""Batches that grow with the gradient noise."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.addons.unequal_ranks.accumulation import Accumulation
from tfdist.addons.unequal_ranks.gradient_noise import GradientNoise, accumulating_optimizer
from tfdist.addons.unequal_ranks.noise import Noise
from tfdist.collectives.objects import broadcast_object
from tfdist.sharding.kept import KeptState
from tfdist.step.context import strategy_of
from tfdist.step.keras_step import KerasStep
from tfdist.utils import checks

_logger = logging.getLogger("tfdist")


def adascale_gain(noise: Noise, rows: float, scale: float) -> float:
    """The factor of the learning rate for a batch that is `scale` times as large: from 1 to `scale`.

    Args:
        noise: The measured noise.
        rows: The samples of the batch for which the rate was chosen.
        scale: The ratio of the current number of samples to `rows`.

    Source: Johnson et al. 2020, "AdaScale SGD", arXiv:2007.05105, equation 4.
    """
    variance, square = noise.variance / rows, max(noise.square, 0.0)
    below = variance / scale + square
    return min(max((variance + square) / below, 1.0), scale) if below > 0 else 1.0


class AdaptiveBatch(GradientNoise, KeptState):
    """Accumulates gradients over more micro-steps as their noise grows, and scales the learning rate.

    ```python
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=16)
    model.compile(optimizer, loss)
    model.fit(data, callbacks=[tfdist.addons.unequal_ranks.AdaptiveBatch()])
    ```

    It begins with `start` micro-steps per update, and doubles them, up to the optimizer's
    `gradient_accumulation_steps`, when the noise scale is at least an update of twice the samples. It
    never decreases them. This changes the training, as a larger batch size would.

    It adds to the logs of an epoch those of `GradientNoise`, and `batch_rows`, `accumulation` and
    `rate_gain`.

    Args:
        start: The micro-steps of an update at the beginning.
        every: The number of updates between two decisions.
        rate: How the rate grows with the batch: "adascale" by AdaScale's gain, for SGD; "sqrt" by the
            square root, for Adam and similar optimizers; "constant" not at all.
        decay: As in `GradientNoise`.

    Raises:
        ValueError: An argument is out of range; by `fit`, if the optimizer accumulates no gradients, or
            fewer micro-steps than `start`, or if its rate is a schedule, which cannot be scaled.

    Source: McCandlish et al. 2018, arXiv:1812.06162; Johnson et al. 2020, arXiv:2007.05105; Qiao et al.
    2020, arXiv:2008.12260.
    """

    name = "adaptive_batch"

    def __init__(
        self, start: int = 1, *, every: int = 20, rate: str = "adascale", decay: float = 0.98
    ):
        super().__init__(decay)
        self._start = checks.integer("start", start, minimum=1)
        self._every = checks.integer("every", every, minimum=1)
        self._rate = checks.one_of("rate", rate, ("adascale", "sqrt", "constant"))
        self._accumulation: Accumulation | None = None
        self._wanted = self._now = self._start
        self._gain = self._next_gain = 1.0
        self._looked = 0

    @property
    def accumulation(self) -> int:
        """The micro-steps of an update now."""
        return self._now

    def prepare(self, model: keras.Model) -> None:
        """See `GradientNoise.prepare`."""
        optimizer = accumulating_optimizer(model)
        most = optimizer.gradient_accumulation_steps
        if not most or most < max(2, self._start):
            raise ValueError(
                "AdaptiveBatch requires `gradient_accumulation_steps` of the optimizer of at least 2 and at "
                f"least `start`. Received: {most}, start={self._start}. Set it as in "
                "keras.optimizers.SGD(0.1, gradient_accumulation_steps=16)."
            )
        if self._rate != "constant" and not _has_plain_rate(optimizer):
            raise ValueError(
                "AdaptiveBatch requires a learning rate that is a number. Received: a schedule. Change the "
                'rate by a keras.callbacks.LearningRateScheduler, or use rate="constant".'
            )
        super().prepare(model)
        strategy = strategy_of(model)
        if strategy is None:
            raise RuntimeError("AdaptiveBatch requires a model with a strategy of tfdist.")
        if self._accumulation is None or self._accumulation.optimizer is not optimizer:
            self._accumulation = Accumulation(optimizer, self._now)
        if self._meter is not None:
            self.gradient_stages = [*self._meter.stages, self._accumulation]

    def on_epoch_begin(self, epoch, logs=None):
        """Sets the micro-steps of an optimizer's first update."""
        self._looked = 0
        if self._accumulation is not None:
            self._accumulation.begin()

    @contextlib.contextmanager
    def around_step(self, step: KerasStep) -> Iterator[None]:
        """See `FitHook.around_step`: counts the micro-steps of an update."""
        yield
        if step.kind == "train" and self._accumulation is not None:
            self._accumulation.end_step()

    def on_train_batch_begin(self, batch, logs=None):
        """Checks the noise at intervals, and changes the batch between two updates."""
        if self._wanted == self._now and batch - self._looked >= self._every * self._now:
            self._looked = batch
            self._look()
        accumulation = self._accumulation
        if accumulation is None or self._wanted == self._now:
            return
        if accumulation.is_between_updates:
            self._grow(accumulation)

    def kept_states(self, model: keras.Model) -> list[KeptState]:
        """See `FitHook.kept_states`."""
        del model
        return [self]

    def values(self, *, in_epoch: bool) -> dict[str, Any] | None:
        """The state for a checkpoint."""
        del in_epoch
        if self._meter is None:
            return None
        return {"accumulation": self._now, "gain": self._gain, "noise": self._meter.values()}

    def restore(self, values: dict[str, Any] | None) -> None:
        """Restores the state of `values`; the optimizer's state includes the rate.

        Raises:
            ValueError: The optimizer accumulates fewer micro-steps now.
        """
        if values is None or self._accumulation is None or self._meter is None:
            return
        found = checks.integer("accumulation", values["accumulation"], minimum=1)
        if found > self._accumulation.most:
            raise ValueError(
                f"The checkpoint requires updates of {found} micro-steps. Received: an optimizer with "
                f"gradient_accumulation_steps={self._accumulation.most}. Use the same number as before."
            )
        self._wanted = self._now = found
        self._gain = self._next_gain = checks.number("gain", values["gain"], above=0)
        self._accumulation.set_steps(found, restored=True)
        self._meter.set_values(values["noise"])

    def _look(self) -> None:
        noise, strategy = self.noise, strategy_of(self.model)
        if noise is None or strategy is None or self._accumulation is None:
            return  # On all ranks, because they have counted the same updates.
        wanted = self._now
        if 2 * wanted <= self._accumulation.most and noise.scale >= 2 * wanted * noise.rows:
            wanted = 2 * wanted
        found = wanted, self._gain_of(noise, self._now), self._gain_of(noise, wanted)
        # Sums of floats may differ between ranks in the last bit.
        self._wanted, gain, self._next_gain = broadcast_object(
            found, strategy.group(), name="adaptive-batch"
        )
        self._set_gain(gain)

    def _grow(self, accumulation: Accumulation) -> None:
        accumulation.set_steps(self._wanted)
        self._now = self._wanted
        self._set_gain(self._next_gain)
        strategy = strategy_of(self.model)
        if strategy is not None and strategy.is_chief:
            _logger.info(
                "Each update has %d micro-steps from now on, with %.3g times the learning rate of %d.",
                self._now,
                self._gain,
                self._start,
            )

    def _set_gain(self, gain: float) -> None:
        """Scales the current rate, which other callbacks may have changed."""
        if gain != self._gain:
            optimizer = accumulating_optimizer(self.model)
            rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            optimizer.learning_rate = rate * gain / self._gain
            self._gain = gain

    def _gain_of(self, noise: Noise, accumulation: int) -> float:
        scale = accumulation / self._start
        if self._rate == "adascale":
            return adascale_gain(noise, noise.rows * self._start, scale)
        return math.sqrt(scale) if self._rate == "sqrt" else 1.0

    def _logs(self) -> dict[str, float]:
        found = super()._logs()
        noise = self.noise
        if noise is not None:
            found["batch_rows"] = noise.rows * self._now
        return {**found, "accumulation": float(self._now), "rate_gain": self._gain}


def _has_plain_rate(optimizer: Any) -> bool:
    """Whether the rate can be assigned."""
    config = optimizer.get_config()["learning_rate"]
    return isinstance(config, int | float)
