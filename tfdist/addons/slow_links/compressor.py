"""The base of compressors of gradients."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.kept import KeptCompression
from tfdist.addons.slow_links.momentum import CompressedMomentum
from tfdist.addons.slow_links.packing import exchange_packed
from tfdist.addons.slow_links.state import compression_state, reduce_compressed, state_of
from tfdist.collectives import Group
from tfdist.gradients.items import GradientItem
from tfdist.gradients.reduce import rows_are_fewer
from tfdist.gradients.stage import GradientContext, GradientStage, Position
from tfdist.mesh import Mesh
from tfdist.sharding.kept import KeptState
from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitContext, FitHook
from tfdist.utils import checks
from tfdist.utils.places import places_by

_logger = logging.getLogger("tfdist")

#: For smaller gradients the cost of a message exceeds that of its bytes.
MIN_ELEMENTS = 1024
_MOST_STEPS = 1 << 40

#: The state that a compressor keeps for one gradient, in addition to the residual.
State = Mapping[str, Any]


class Compressor(GradientStage, FitHook):
    """Sends a compressed gradient, and the rest with a later one (error feedback).

    In each step, of a gradient g and the residual e of earlier steps, a rank sends c = compress(g + e)
    and keeps e' = g + e - decompress(c). All ranks use the mean of what the ranks have sent. tfdist
    stores the residual with the model, and saves it in checkpoints. See Karimireddy et al., "Error
    Feedback Fixes SignSGD", arXiv:1901.09847.

    A custom compressor defines `compress` and `decompress`:

    ```python
    class EveryOther(tfdist.addons.slow_links.Compressor):
        def compress(self, tensor, state, step):
            return tf.reshape(tensor, [-1])[::2]

        def decompress(self, payload, shape):
            odd = tf.zeros_like(payload)
            return tf.reshape(tf.stack([payload, odd], axis=1), [-1])[: math.prod(shape)]
    ```

    Args:
        start_step: The number of first steps that send gradients uncompressed: early gradients change
            too fast for delayed parts. The time of a step without compression is measured on them, too.
        min_elements: Smaller gradients are never compressed.

    Attributes:
        is_linear: Whether the mean of compressed gradients is the compressed mean, so that it is
            all-reduced. Otherwise each rank gets the compressed gradients of all others.

    Raises:
        ValueError: An argument is out of range.
    """

    is_linear = False
    position = Position.REDUCE

    def __init__(self, *, start_step: int = 10, min_elements: int = MIN_ELEMENTS):
        checks.integer("start_step", start_step, minimum=0, maximum=_MOST_STEPS)
        checks.integer("min_elements", min_elements, minimum=1)
        self.start_step, self.min_elements = start_step, min_elements

    def selects(self, shape: tuple[int, ...]) -> bool:
        """Whether gradients of a shape are compressed. Others are sent whole."""
        return math.prod(shape) >= self.min_elements

    def initial_state(self, shape: tuple[int, ...], num_ranks: int) -> dict[str, np.ndarray]:
        """The state that is kept for a gradient in addition to the residual, by name.

        Args:
            shape: The gradient's shape.
            num_ranks: The number of ranks that exchange it.
        """
        del shape, num_ranks
        return {}

    def prepare(self, gradient: tf.Tensor, state: State, num_ranks: int) -> tf.Tensor:
        """The tensor that is added to the residual for a gradient; by default the gradient.

        Args:
            gradient: This rank's gradient, float32.
            state: As for `compress`.
            num_ranks: The number of ranks that exchange it.
        """
        del state, num_ranks
        return gradient

    @abc.abstractmethod
    def compress(self, tensor: tf.Tensor, state: State, step: tf.Tensor) -> Any:
        """Compresses a gradient to a nest of tensors, which have the same shapes on all ranks.

        Args:
            tensor: The gradient and its residual, float32.
            state: Variables by the names of `initial_state`; they may be assigned to.
            step: The number of steps so far, int64.
        """

    @abc.abstractmethod
    def decompress(self, payload: Any, shape: tuple[int, ...]) -> tf.Tensor:
        """Decompresses what was sent to a gradient: a float32 tensor.

        Args:
            payload: The result of `compress`; of a linear compressor also the mean of several ranks'.
            shape: The gradient's shape.
        """

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        states: Sequence[State],
        step: tf.Tensor,
        group: Group,
        name: str,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Compresses gradients, exchanges them over a group, and decompresses them.

        Args:
            tensors: The gradients and their residuals, float32.
            states: The state of each.
            step: The number of steps so far, int64.
            group: The ranks.
            name: A name of the data, for messages.

        Returns:
            The means over the ranks, bitwise equal on all of them; and what this rank has sent, as
            the others decompress it. The rest becomes the residual.
        """
        pairs = list(zip(tensors, states, strict=True))
        payloads = [self.compress(tensor, state, step) for tensor, state in pairs]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        own = [self.decompress(p, shape) for p, shape in zip(payloads, shapes, strict=True)]
        # A row holds what one rank sends.
        leaves = [tf.convert_to_tensor(leaf)[None] for leaf in tf.nest.flatten(payloads)]
        if self.is_linear:
            rows = exchange_packed("mean", leaves, group, name)
            sums = tf.nest.pack_sequence_as(payloads, [row[0] for row in rows])
            return [self.decompress(p, s) for p, s in zip(sums, shapes, strict=True)], own
        rows = exchange_packed("all_gather", leaves, group, name)
        totals: list = [None] * len(tensors)
        for rank in range(group.size):
            theirs = tf.nest.pack_sequence_as(payloads, [row[rank] for row in rows])
            for place, (payload, shape) in enumerate(zip(theirs, shapes, strict=True)):
                found = self.decompress(payload, shape)
                totals[place] = found if rank == 0 else totals[place] + found
        return [total / group.size for total in totals], own

    # -- on the path of gradients -------------------------------------------------------------------

    def check(self, *, mesh: Mesh, zero_stage: int, optimizer) -> None:
        """See `GradientStage.check`."""
        del mesh
        if not isinstance(optimizer, CompressedMomentum):
            return
        kind = type(optimizer).__name__
        if zero_stage:
            raise ValueError(
                f"{kind} requires zero_stage=0: it compresses whole momentums. Received: zero_stage="
                f"{zero_stage}. Remove `zero_stage`, or use AdamW."
            )
        if self.start_step < optimizer.freeze_step:
            raise ValueError(
                f"{kind} requires a `start_step` of its `freeze_step` or more. Received: freeze_step="
                f"{optimizer.freeze_step}, {self}. Use the same number for both."
            )

    def claims(self, item: GradientItem) -> bool:
        """See `GradientStage.claims`: dense gradients that it selects, and sparse ones sent as dense."""
        gradient = item.gradient
        if gradient is None or item.group.size == 1:
            return False
        if not self.selects(tuple(item.variable.shape)):
            return False
        if not isinstance(gradient, tf.IndexedSlices):
            return True
        return not (item.keeps_rows or rows_are_fewer(gradient, item.group))

    def __call__(self, items: Sequence[GradientItem], context: GradientContext) -> list:
        """See `GradientStage`: reduces the gradients of each group, and keeps their residuals."""
        state = compression_state(context.optimizer, self)
        found: list = [tf.convert_to_tensor(item.gradient) for item in items]
        optimizer = context.optimizer
        momentum = optimizer if isinstance(optimizer, CompressedMomentum) else None
        together = places_by((item.group, item.reduction) for item in items)
        for number, ((group, reduction), places) in enumerate(together.items()):
            reduced = reduce_compressed(
                [found[place] for place in places],
                [items[place].variable for place in places],
                state,
                group,
                reduction,
                context.strategy.gradient_options,
                momentum=momentum,
                begins=number == 0,
            )
            for place, gradient in zip(places, reduced, strict=True):
                found[place] = gradient
        state.end_step()
        return found

    def kept_states(self, model: keras.Model) -> list[KeptState]:
        """See `GradientStage.kept_states`."""
        strategy, state = strategy_of(model), state_of(model, self)
        if strategy is None or state is None:
            return []
        return [KeptCompression(model, state, strategy)]

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`: after a `fit` the chief logs the cost and benefit of compression."""
        yield
        state = state_of(fit.model, self) if fit.kind == "fit" else None
        if state is None or not fit.strategy.is_chief:
            return
        statistics = state.meter.read()
        if statistics.compressed_steps:
            level = logging.INFO if statistics.pays else logging.WARNING
            _logger.log(level, "%s", statistics)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"start_step": self.start_step, "min_elements": self.min_elements}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({values})"
