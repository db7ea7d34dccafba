"""Deep gradient compression: the largest entries of each gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.compressor import MIN_ELEMENTS, Compressor, State
from tfdist.utils import checks

#: The fraction that is sent at the beginning of the warm-up.
_FIRST_RATIO = 0.25


class TopK(Compressor):
    """Sends the entries of the largest absolute values, with their places.

    With `momentum_correction` it is DGC (Lin et al., arXiv:1712.01887): each rank keeps a momentum
    u' = m u + g and sends entries of its accumulated sum, and both are cleared where they were sent
    (factor masking). The optimizer must then be SGD without momentum.

    Args:
        ratio: The fraction of the entries that is sent, above 0 and at most 1.
        momentum_correction: The momentum m, at least 0 and below 1.
        warmup_steps: The number of steps after `start_step` in which the fraction that is sent falls from
            a quarter to `ratio`, by the same factor each step.
        clip_norm: The norm to which each gradient is clipped on its rank before it is accumulated,
            divided by the square root of the number of ranks, because their gradients are summed. None
            for no limit.
        start_step: The number of first steps that send gradients uncompressed.
        min_elements: Smaller gradients are never compressed.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        momentum_correction: float = 0.0,
        warmup_steps: int = 0,
        clip_norm: float | None = None,
        start_step: int = 10,
        min_elements: int = MIN_ELEMENTS,
    ):
        super().__init__(start_step=start_step, min_elements=min_elements)
        checks.number("ratio", ratio, above=0, maximum=1)
        checks.number("momentum_correction", momentum_correction, minimum=0, below=1)
        checks.integer("warmup_steps", warmup_steps, minimum=0, maximum=1 << 40)
        if clip_norm is not None:
            checks.number("clip_norm", clip_norm, above=0)
        self.ratio, self.momentum_correction = float(ratio), float(momentum_correction)
        self.warmup_steps, self.clip_norm = warmup_steps, clip_norm

    def initial_state(self, shape: tuple[int, ...], num_ranks: int) -> dict[str, np.ndarray]:
        """The momentum, if momentum correction is used."""
        del num_ranks
        if not self.momentum_correction:
            return {}
        return {"momentum": np.zeros(math.prod(shape), "float32")}

    def prepare(self, gradient: tf.Tensor, state: State, num_ranks: int) -> tf.Tensor:
        """The gradient, clipped; with momentum correction this rank's momentum."""
        if self.clip_norm is not None:
            limit = self.clip_norm / math.sqrt(num_ranks)
            gradient = tf.clip_by_norm(gradient, limit)
        if not self.momentum_correction:
            return gradient
        flat = tf.reshape(gradient, [-1])
        momentum = self.momentum_correction * tf.convert_to_tensor(state["momentum"]) + flat
        state["momentum"].assign(momentum)
        return tf.reshape(momentum, gradient.shape)

    def compress(self, tensor: tf.Tensor, state: State, step: tf.Tensor) -> Any:
        """The largest entries, of shape [k], and their places in the flat array."""
        flat = tf.reshape(tensor, [-1])
        count = self._count(math.prod(tensor.shape), step)
        places = tf.math.top_k(tf.abs(flat), count, sorted=False).indices
        if self.momentum_correction:
            kept = tf.tensor_scatter_nd_update(
                tf.convert_to_tensor(state["momentum"]), places[:, None], tf.zeros([count])
            )
            state["momentum"].assign(kept)
        return {"values": tf.gather(flat, places), "places": places}

    def decompress(self, payload: Any, shape: tuple[int, ...]) -> tf.Tensor:
        """An array of zeros except for the entries that were sent."""
        flat = tf.scatter_nd(payload["places"][:, None], payload["values"], [math.prod(shape)])
        return tf.reshape(flat, shape)

    def _count(self, size: int, step: tf.Tensor) -> int | tf.Tensor:
        """The number of entries out of `size` that are sent at a step."""
        least = max(1, math.ceil(self.ratio * size))
        if not self.warmup_steps or self.ratio >= _FIRST_RATIO:
            return least
        done = tf.cast(step - self.start_step, tf.float32) / self.warmup_steps
        ratio = _FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** tf.clip_by_value(done, 0.0, 1.0)
        return tf.maximum(tf.cast(tf.math.ceil(ratio * size), tf.int32), least)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "ratio": self.ratio,
            "momentum_correction": self.momentum_correction,
            "warmup_steps": self.warmup_steps,
            "clip_norm": self.clip_norm,
            **super().get_config(),
        }
