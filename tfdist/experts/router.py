"""Which experts compute a token, and how much each of them counts."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router says of some tokens.

    Attributes:
        experts: The experts of each token, the best first: int32, [tokens, top_k].
        gates: What their outputs are multiplied by: float32, [tokens, top_k].
        probabilities: How probable each expert is, as the balance loss counts it: float32,
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
        top_k: How many experts a token has.
        scores: What makes scores of logits: "softmax" or "sigmoid".
        score_first: Whether it does before the choice, so over all experts; else over those chosen.
        normalize: Whether the gates of a token are divided by their sum.
        scale: What gates are multiplied by.
        bias: For each expert, what is added for the choice alone (Wang et al. 2024, "Auxiliary-Loss-Free
            Load Balancing Strategy for Mixture-of-Experts"); None for nothing.
    """
    score = tf.nn.softmax if scores == "softmax" else tf.sigmoid
    every = score(logits)
    candidates = every if score_first else logits
    if bias is None:
        best, experts = tf.math.top_k(candidates, k=top_k)
    else:
        _, experts = tf.math.top_k(tf.stop_gradient(candidates) + bias, k=top_k)
        best = tf.gather(candidates, experts, batch_dims=1)
    gates = best if score_first else score(best)
    if normalize:
        # Sigmoids of a token may all be next to nothing.
        gates /= tf.reduce_sum(gates, axis=-1, keepdims=True) + 1e-20
    probabilities = every
    if scores == "sigmoid":
        probabilities = every / (tf.reduce_sum(every, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, gates if scale == 1.0 else gates * scale, probabilities, logits)
