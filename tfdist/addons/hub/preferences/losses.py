"""Losses of pairs of answers, from log-probabilities of which only some tokens' logits are in memory at a time.

The rows of a batch are pairs: a chosen answer, then the rejected one to the same prompt. Labels are float32 of shape
[rows, time, 4 or 5]: the next token, whether it is one of the answer, its weight in the likelihood of ORPO, the
log-probability of the row's answer by the reference model, and, unless it is 1, the weight of the pair.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist.layers import VocabParallelCrossEntropy
from tfdist.utils import checks

#: The kinds of `PreferenceLoss` that compare with a reference model.
REFERENCED = ("dpo", "ipo", "conservative", "robust")
KINDS = (*REFERENCED, "orpo")


class LogProbabilityLoss(VocabParallelCrossEntropy):
    """The negative log-probabilities of tokens; the base of losses that compute with these.

    The last dim of labels has the next token, whether it is one of the answer, and more.
    """

    #: By which logits are divided.
    temperature: float = 1.0
    _recorder: Recorder | None = None

    def log_probabilities(self, y_true, y_pred):
        """The log-probability of each next token: [rows, time]."""
        if self.temperature != 1.0:
            y_pred = keras.ops.cast(y_pred, "float32") / self.temperature
        found = -VocabParallelCrossEntropy.call(self, y_true[..., 0], y_pred)
        if self._recorder is not None:
            self._recorder.write(y_true[:, 0, -1], found * tf.cast(y_true[..., 1], found.dtype))
        return found

    def call(self, y_true, y_pred):
        """Maps labels [rows, time, any] and logits [rows, time, vocabulary] to losses [rows, time]."""
        return -self.log_probabilities(y_true, y_pred)

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Inside, graphs are made that write log-probabilities; labels end with the number of the row."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None


class Recorder:
    """The log-probabilities of this rank's rows.

    Args:
        rows: The number of rows; a row of padding has this number.
        length: The tokens of a row; None for the sum over each row.
    """

    def __init__(self, rows: int, length: int | None = None):
        shape = [rows + 1] if length is None else [rows + 1, length]
        with tf.init_scope(), tf.device("/CPU:0"):
            self._found = tf.Variable(tf.zeros(shape), trainable=False)
            self._known = tf.Variable(tf.zeros([rows + 1], tf.bool), trainable=False)

    def reset(self) -> None:
        """Forgets all rows."""
        self._known.assign(tf.zeros_like(self._known))

    def write(self, numbers, values) -> None:
        """Writes the values [rows, time] of rows by their numbers."""
        values = tf.cast(values, tf.float32)
        if self._found.shape.rank == 1:
            values = tf.reduce_sum(values, axis=1)
        places = tf.cast(numbers, tf.int32)[:, None]
        self._found.scatter_nd_update(places, values)
        self._known.scatter_nd_update(places, tf.ones_like(places[:, 0], tf.bool))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """The values of all rows, and whether each was written."""
        return self._found.numpy()[:-1], self._known.numpy()[:-1]


@keras.saving.register_keras_serializable(package="tfdist")
class PreferenceLoss(LogProbabilityLoss):
    """The loss of each pair of a chosen and a rejected answer.

    With d the difference, between the chosen and the rejected answer, of log p - log p of the reference:

    - "dpo": -log sigmoid(beta d) (Rafailov et al. 2023, arXiv:2305.18290).
    - "conservative": -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), e being `label_smoothing`: the share of
      pairs that are the wrong way round (Mitchell 2023).
    - "robust": (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e) (Chowdhury et al. 2024,
      arXiv:2403.00409).
    - "ipo": (d' - 1 / (2 beta))^2, d' being the difference of means over tokens (Azar et al. 2023,
      arXiv:2310.12036).
    - "orpo": the negative log-likelihood of the chosen row, minus beta log sigmoid(log odds ratio of both answers by
      their means over tokens), without a reference (Hong et al. 2024, arXiv:2403.07691).

    Args:
        vocabulary_size: As for `VocabParallelCrossEntropy`.
        kind: One of these.
        beta: Above 0.
        label_smoothing: At least 0 and below 0.5.
        name: The loss's name.
        **kwargs: `chunk_size`, `dtype` and `reduction` of `VocabParallelCrossEntropy`.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        kind: str = "dpo",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        name: str = "preference_loss",
        **kwargs,
    ):
        super().__init__(vocabulary_size, name=name, **kwargs)
        self.kind = checks.one_of("kind", kind, KINDS)
        self.beta = checks.number("beta", beta, above=0)
        self.label_smoothing = checks.number(
            "label_smoothing", label_smoothing, minimum=0, below=0.5
        )
        if self.label_smoothing and kind not in ("conservative", "robust"):
            raise ValueError(
                "`label_smoothing` requires the kinds conservative or robust. "
                f"Received: label_smoothing={label_smoothing}, kind={kind!r}."
            )

    def call(self, y_true, y_pred):
        """Maps labels [rows, time, 4 or 5] and logits [rows, time, vocabulary] to losses [rows / 2]."""
        losses = self._losses(y_true, y_pred)
        if y_true.shape[-1] < 5:
            return losses
        # The losses of pairs of padding may not be finite.
        weights, _ = _pairs(tf.cast(y_true[:, 0, 4], losses.dtype))
        return tf.where(weights > 0, weights * losses, tf.zeros_like(losses))

    def _losses(self, y_true, y_pred):
        found = self.log_probabilities(y_true, y_pred)
        inside = tf.cast(y_true[..., 1], found.dtype)
        sums, counts = tf.reduce_sum(found * inside, axis=1), tf.reduce_sum(inside, axis=1)
        if self.kind == "orpo":
            likelihood = tf.reduce_sum(found * tf.cast(y_true[..., 2], found.dtype), axis=1)
            chosen, rejected = _pairs(tf.math.divide_no_nan(sums, counts))
            odds = chosen - rejected - (_log_of_rest(chosen) - _log_of_rest(rejected))
            return -_pairs(likelihood)[0] - self.beta * tf.math.log_sigmoid(odds)
        ratios = sums - tf.cast(y_true[:, 0, 3], sums.dtype)
        if self.kind == "ipo":
            chosen, rejected = _pairs(tf.math.divide_no_nan(ratios, counts))
            return tf.square(chosen - rejected - 1 / (2 * self.beta))
        chosen, rejected = _pairs(ratios)
        scaled, e = self.beta * (chosen - rejected), self.label_smoothing
        right, wrong = tf.math.log_sigmoid(scaled), tf.math.log_sigmoid(-scaled)
        if self.kind == "robust":
            return (-(1 - e) * right + e * wrong) / (1 - 2 * e)
        return -(1 - e) * right - e * wrong

    def get_config(self):
        """The configuration."""
        own = {name: getattr(self, name) for name in ("kind", "beta", "label_smoothing")}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="tfdist")
class GRPOLoss(LogProbabilityLoss):
    """The loss of each token of sampled answers, by the advantage of the answer.

    Labels are float32 of shape [rows, time, 5]: the next token, its weight in the loss, the advantage of the row,
    and the log-probabilities of the token when it was sampled and by the reference model.

    With r = exp(log p - log p when sampled): -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k, k being
    the estimate exp(q) - q - 1 of the divergence from the reference, with q = log p of the reference - log p.

    Args:
        vocabulary_size: As for `VocabParallelCrossEntropy`.
        on_policy: Whether answers were sampled by the model as it is, so that each ratio is 1 and only has a
            gradient.
        beta: The factor of the divergence; 0 for no reference.
        epsilon: The most that a ratio counts below 1.
        epsilon_high: The most that a ratio counts above 1; None for `epsilon`.
        temperature: That with which answers are sampled; p is the probability at this temperature.
        name: The loss's name.
        **kwargs: `chunk_size`, `dtype` and `reduction` of `VocabParallelCrossEntropy`.

    Source: Shao et al. 2024, arXiv:2402.03300; Yu et al. 2025, arXiv:2503.14476, for `epsilon_high`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        on_policy: bool = False,
        beta: float = 0.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        temperature: float = 1.0,
        name: str = "grpo_loss",
        **kwargs,
    ):
        kwargs.setdefault("reduction", "sum")
        super().__init__(vocabulary_size, name=name, **kwargs)
        self.on_policy = checks.boolean("on_policy", on_policy)
        self.beta = checks.number("beta", beta, minimum=0)
        self.epsilon = checks.number("epsilon", epsilon, minimum=0, maximum=1)
        self.epsilon_high = checks.number("epsilon_high", epsilon_high, minimum=0, optional=True)
        self.temperature = checks.number("temperature", temperature, above=0)

    def call(self, y_true, y_pred):
        """Maps labels [rows, time, 5] and logits [rows, time, vocabulary] to weighted losses [rows, time]."""
        found = self.log_probabilities(y_true, y_pred)
        weight, advantage, old, reference = (
            tf.cast(y_true[..., place], found.dtype) for place in range(1, 5)
        )
        if self.on_policy:
            old = tf.stop_gradient(found)
        # Other tokens have no value in `old`, with which the ratio may overflow.
        inside = weight > 0
        ratio = tf.exp(tf.where(inside, found - old, tf.zeros_like(found)))
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipped = tf.clip_by_value(ratio, 1 - self.epsilon, 1 + high)
        losses = -tf.minimum(ratio * advantage, clipped * advantage)
        if self.beta:
            apart = tf.where(inside, reference - found, tf.zeros_like(found))
            losses += self.beta * (tf.exp(apart) - apart - 1.0)
        return losses * weight

    def get_config(self):
        """The configuration."""
        names = ("on_policy", "beta", "epsilon", "epsilon_high", "temperature")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _pairs(values) -> tuple[tf.Tensor, tf.Tensor]:
    """The values of chosen and of rejected rows."""
    chosen, rejected = tf.unstack(tf.reshape(values, [-1, 2]), axis=1)
    return chosen, rejected


def _log_of_rest(log_probability):
    """log(1 - exp(x)) for x < 0, without loss of digits (Maechler 2012, "Accurately Computing log(1 - exp(-|a|))")."""
    near = log_probability > -math.log(2)
    # Each branch has values with finite gradients, also where the other is taken.
    small = tf.where(near, log_probability, -tf.ones_like(log_probability))
    large = tf.where(near, -tf.ones_like(log_probability), log_probability)
    return tf.where(near, tf.math.log(-tf.math.expm1(small)), tf.math.log1p(-tf.exp(large)))
