"""Gradient noise: the covariance of gradients over samples, from those of parts of a batch and of all of it.

With G the gradient of the loss over all data and tr(S) the trace of the covariance of one sample's
gradient, the mean gradient of b samples has E|g_b|^2 = |G|^2 + tr(S) / b. A step of B samples in n
parts (ranks, and the micro-steps of an accumulation), of w_i B samples each, yields the
gradients g_i of the parts and their mean g = sum(w_i g_i):

    tr(S) = B / (n - 1) (sum(w_i |g_i|^2) - |g|^2)       |G|^2 = |g|^2 - tr(S) / B

Both estimates are unbiased. The noise scale is the quotient tr(S) / |G|^2 of their moving averages.

Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, for parts of one size; Qiao et al. 2020
(Pollux), arXiv:2008.12260, section 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import all_reduce
from tfdist.gradients.items import GradientItem
from tfdist.gradients.norms import square_parts, weighted_square
from tfdist.gradients.stage import GradientStage, Position
from tfdist.sharding.layout import layout_of
from tfdist.step.context import DistributedStrategy
from tfdist.step.keras_step import KerasStep


@dataclasses.dataclass(frozen=True)
class Noise:
    """Measured noise, as a moving average.

    Attributes:
        variance: The trace of the covariance of a sample's gradient.
        square: The squared norm of the gradient without noise; 0 or below where noise dominates.
        rows: The samples of a micro-step, of all ranks.
        updates: The number of measured updates.
    """

    variance: float
    square: float
    rows: float
    updates: int

    @property
    def scale(self) -> float:
        """The noise scale: the batch size, in samples, at which noise and gradient are equal."""
        return self.variance / self.square if self.square > 0 else math.inf


class NoiseMeter:
    """Measures the gradients on their path (`GradientPath`), in every update.

    It costs a pass over this rank's gradients and one over the global ones, and the sum of a few numbers.
    It includes variables of which every rank has a copy or a part, and whose gradient is a mean over
    rows: not experts, not parameters under ZeRO-3, and not those of whose gradient each rank of a tensor
    axis has a part.

    Args:
        strategy: The strategy.
        decay: The decay of the moving averages.

    Attributes:
        stages: The stages that measure on the path.
    """

    def __init__(self, strategy: DistributedStrategy, decay: float):
        self._strategy, self._decay = strategy, decay
        with tf.init_scope(), tf.device("/CPU:0"):
            # Of this rank since the last update: weighted squares, samples, parts with samples, and
            # micro-steps.
            self._own = tf.Variable(tf.zeros([4], tf.float64), trainable=False, name="noise_own")
            # Moving averages of the variance, the square, the samples of a micro-step and of one; the
            # number of updates.
            self._means = tf.Variable(tf.zeros([5], tf.float64), trainable=False, name="noise")

        self.stages: tuple[GradientStage, ...] = (_Own(self), _Global(self))

    def read(self) -> Noise | None:
        """The measurements; None before the first update of several parts."""
        variance, square, rows, weight, updates = self._means.numpy().tolist()
        if not weight:
            return None
        return Noise(variance / weight, square / weight, rows / weight, int(updates))

    def values(self) -> list[float]:
        """The state, for a checkpoint."""
        return self._means.numpy().tolist()

    def set_values(self, values: Sequence[float]) -> None:
        """Restores the state of `values`."""
        self._means.assign(values)

    def add(self, items: Sequence[GradientItem], step: KerasStep | None) -> None:
        """Adds the gradients of a micro-step of this rank, after they were weighted.

        Args:
            items: Gradients that are share * ranks times the mean over this rank's rows.
            step: The current Keras step; other functions are not measured.
        """
        if any(item.is_global for item in items):
            raise ValueError(
                "GradientNoise requires that a training step passes gradients to the optimizer as the tape "
                "returns them, because it compares the ranks' gradients with the global one. Received: a "
                "train_step that reads them before."
            )
        if step is None:
            return
        mesh, size = self._strategy.mesh, step.gradient_group.size
        found = self._measured(items)
        peers = mesh.size // size

        def holders(variable) -> int:
            layout = layout_of(variable)
            if not layout.counts:
                return 0
            axes = layout.replicated_axes(mesh)
            return math.prod(mesh.shape[axis] for axis in axes if axis not in mesh.gradient_axes)

        square = square_parts([(gradient, holders(variable)) for gradient, variable in found])
        share = tf.cast(step.gradient_share, tf.float64)
        rows = tf.cast(step.rows, tf.float64)
        has_rows = tf.cast(rows > 0, tf.float64)
        part = tf.math.divide_no_nan(square, share * size * size)
        one = tf.ones([], tf.float64)
        self._own.assign_add(tf.stack([part, rows / peers, has_rows / peers, one]))

    def update(self, items: Sequence[GradientItem], step: KerasStep | None) -> None:
        """Adds an update.

        Args:
            items: The global gradients.
            step: The current Keras step.
        """
        if step is None:
            return
        found = self._measured(items)
        mesh = self._strategy.mesh
        square = weighted_square(
            [gradient for gradient, _ in found], [variable for _, variable in found], mesh
        )
        own = self._own.read_value()
        sums = all_reduce(
            tf.stack([own[0], own[1], own[2], square]), self._strategy.group(), name="noise"
        )
        parts_square, rows, parts, square = tf.unstack(sums)
        parts_square = tf.math.divide_no_nan(parts_square, own[3])
        variance = rows / (parts - 1) * (parts_square - square)
        without_noise = square - variance / rows
        new = tf.stack([variance, without_noise, rows / own[3], 1.0])
        is_known = (parts > 1.5) & tf.reduce_all(tf.math.is_finite(new))
        means = self._decay * self._means[:4] + (1 - self._decay) * tf.where(is_known, new, 0.0)
        means = tf.concat([means, self._means[4:] + 1], axis=0)
        self._means.assign(tf.where(is_known, means, self._means))
        self._own.assign(tf.zeros([4], tf.float64))

    def _measured(self, items: Sequence[GradientItem]) -> list[tuple]:
        mesh = self._strategy.mesh
        return [
            (item.gradient, item.variable)
            for item in items
            if item.layout.flat is None
            and item.layout.partial_over is None
            and not item.layout.has_global_gradient(mesh)
        ]


class _Own(GradientStage):
    """Measures this rank's gradients."""

    position = Position.LOCAL

    def __init__(self, meter: NoiseMeter):
        self._meter = meter

    def __call__(self, items, context):
        self._meter.add(items, context.step)
        return [item.gradient for item in items]


class _Global(GradientStage):
    """Measures the global gradients."""

    position = Position.REDUCED

    def __init__(self, meter: NoiseMeter):
        self._meter = meter

    def __call__(self, items, context):
        self._meter.update(items, context.step)
        return [item.gradient for item in items]
