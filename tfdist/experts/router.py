"""The choice of the experts of each token, and their gates."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class Routing:
    """The result of a router for some tokens.

    Attributes:
        experts: The experts of each token, the best first: int32, [tokens, top_k].
        gates: The factors of their outputs: float32, [tokens, top_k].
        probabilities: The probability of each expert in the balance loss: float32,
            [tokens, num_experts].
        logits: The router's outputs: float32, [tokens, num_experts].
    """

    experts: tf.Tensor
    gates: tf.Tensor
    probabilities: tf.Tensor
    logits: tf.Tensor


def route(
    logits: tf.Tensor,
    top_k: int,
    *,
    scores: str = "softmax",
    score_first: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    bias: tf.Tensor | None = None,
) -> Routing:
    """Chooses the `top_k` experts of each token.

    Args:
        logits: float32, [tokens, num_experts].
        top_k: The number of experts of a token.
        scores: The function from logits to scores: "softmax" or "sigmoid".
        score_first: Whether scores are computed before the choice, over all experts; otherwise after it,
            over the chosen experts.
        normalize: Whether the gates of a token are divided by their sum.
        scale: The factor of the gates.
        bias: An addend for each expert that affects only the choice (Wang et al. 2024,
            "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"); None for none.
    """
    score = tf.nn.softmax if scores == "softmax" else tf.sigmoid
    every = score(logits)
    candidates = every if score_first else logits
    if bias is None and not devices.has_gpu():
        best, experts = tf.math.top_k(candidates, k=top_k)
    else:
        chosen_by = tf.stop_gradient(candidates)
        _, experts = tf.math.top_k(chosen_by if bias is None else chosen_by + bias, k=top_k)
        best = _entries(candidates, experts)
    gates = best if score_first else score(best)
    if normalize:
        # All sigmoids of a token may be close to 0.
        gates /= tf.reduce_sum(gates, axis=-1, keepdims=True) + 1e-20
    probabilities = every
    if scores == "sigmoid":
        probabilities = every / (tf.reduce_sum(every, axis=-1, keepdims=True) + 1e-20)
    # The numbers of experts become sizes, for which the host waits here, once.
    with devices.on_host():
        experts = tf.identity(experts)
    return Routing(experts, gates if scale == 1.0 else gates * scale, probabilities, logits)


def _entries(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """The entries of each row [rows, columns] at some places [rows, n]; on a GPU without work of the host."""
    if not devices.has_gpu():
        return tf.gather(values, places, batch_dims=1)

    @custom_gradient
    def pick(values):
        hot = tf.one_hot(places, values.shape[1], dtype=values.dtype)
        found = tf.reduce_sum(hot * values[:, None], axis=2)
        return found, lambda dy: tf.reduce_sum(hot * dy[:, :, None], axis=1)

    return pick(values)
