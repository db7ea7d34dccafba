"""The noise of gradients in the logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.addons.unequal_ranks.noise import Noise, NoiseMeter
from tfdist.step.context import DistributedStrategy, strategy_of
from tfdist.step.hooks import FitContext, FitHook
from tfdist.utils import checks


class GradientNoise(keras.callbacks.Callback, FitHook):
    """Adds the noise scale of gradients to the logs of each epoch.

    - `noise_scale`: the trace of the covariance of a sample's gradient, over the squared norm of the
      gradient of all data: the batch size at which noise and gradient are equal. Far smaller batches
      need the same number of samples to reach a loss, far larger ones the same number of steps.
    - `gradient_variance`, `gradient_square`: the two.

    They are measured from the gradients of the ranks, or of the micro-steps of an accumulation, and of
    all of them together: at least two of either are required.

    Args:
        decay: The decay of the moving averages over updates, between 0 and 1.

    Raises:
        ValueError: An argument is out of range; by `fit`, if the model was not created under a
            strategy of tfdist's ranks, if gradients have no parts to compare, or if ranks share
            sequences.

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162.
    """

    async_safe = True

    def __init__(self, decay: float = 0.98):
        super().__init__()
        self._decay = checks.number("decay", decay, above=0, below=1)
        self._meter: NoiseMeter | None = None
        self._measured: Any = None

    @property
    def noise(self) -> Noise | None:
        """The measurements so far; None before the first update."""
        return None if self._meter is None else self._meter.read()

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`."""
        if fit.kind == "fit":
            self.prepare(fit.model)
        yield

    def prepare(self, model: keras.Model) -> None:
        """Begins to measure the steps of a model.

        Raises:
            ValueError: The noise cannot be measured: see the class.
        """
        strategy = strategy_of(model)
        if strategy is None:
            raise self._no_strategy(model)
        self._check(strategy, model)
        if self._measured is not model:
            self._measured, self._meter = model, NoiseMeter(strategy, self._decay)
            self.gradient_stages = list(self._meter.stages)

    def on_train_begin(self, logs=None):
        """Checks that `fit` has called `prepare`, which requires a strategy of tfdist."""
        if self._measured is not self.model:
            raise self._no_strategy(self.model)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the measurements to the logs."""
        if logs is not None:
            logs |= self._logs()

    def _no_strategy(self, model: keras.Model) -> ValueError:
        return ValueError(
            f"{type(self).__name__} requires a model that was created in the scope of a strategy of "
            f"tfdist. Received: a model under {type(model.distribute_strategy).__name__}. For one "
            "process use `tfdist.strategies.LocalStrategy`."
        )

    def _logs(self) -> dict[str, float]:
        noise = self.noise
        if noise is None:
            return {}
        return {
            "noise_scale": noise.scale,
            "gradient_variance": noise.variance,
            "gradient_square": noise.square,
        }

    def _check(self, strategy: DistributedStrategy, model: keras.Model) -> None:
        if strategy.token_group.size > 1:
            raise ValueError(
                "Gradient noise cannot be measured with a context axis: its ranks have parts of samples. "
                f"Received: {strategy.mesh!r}. Remove {type(self).__name__}."
            )
        if strategy.zero_stage == 3:
            raise ValueError(
                "Gradient noise is not supported with ZeRO-3, which sums gradients layer by layer. Received: "
                f"zero_stage=3. Use zero_stage=2, or remove {type(self).__name__}."
            )
        optimizer = accumulating_optimizer(model)
        if strategy.row_group.size == 1 and not optimizer.gradient_accumulation_steps:
            raise ValueError(
                "Gradient noise requires at least two parts of a batch. Received: one rank, and an "
                "optimizer without `gradient_accumulation_steps`. Set it, or start more ranks."
            )


def accumulating_optimizer(model: keras.Model) -> Any:
    """The optimizer that accumulates gradients: that of a model, without a loss scale around it."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)
