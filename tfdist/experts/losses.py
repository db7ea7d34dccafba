"""The losses that a layer of experts adds, over the tokens of all ranks.

A step's loss is the sum over ranks of share times local loss (`tfdist.step.context`). Here a rank's part of a
mean over all tokens is computed such that this sum is the mean: the sum over its tokens, divided by the
number of all tokens times its share. The balance loss is a product of two means; that of counts has no
gradient, so only the counts are summed over ranks.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.backend import devices
from tfdist.collectives import all_reduce
from tfdist.experts.permutation import count_by_expert
from tfdist.step.context import current_replica, current_step, role_of


@dataclasses.dataclass(frozen=True)
class Tokens:
    """This rank's tokens that are included in losses and counts.

    Attributes:
        layer: The layer's name, for messages.
        counted: Whether each token is included: bool, [tokens]; None for all.
        is_masked: Whether some tokens of a sequence may be excluded.
        total: The number of included tokens: a scalar tensor.
    """

    layer: str
    counted: tf.Tensor | None
    is_masked: bool
    total: tf.Tensor

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of values [tokens, ...] over the included tokens."""
        # The gradient of a sum that drops a dim of unknown size computes shapes on the device.
        return tf.squeeze(tf.reduce_sum(self.only(values), axis=0, keepdims=True), axis=0)

    def only(self, values: tf.Tensor) -> tf.Tensor:
        """The values, with zeros for excluded tokens."""
        if self.counted is None:
            return values
        counted = tf.reshape(self.counted, [-1] + [1] * (values.shape.rank - 1))
        return tf.where(counted, values, tf.zeros([], values.dtype))

    def mean(self, sums: tf.Tensor) -> tf.Tensor:
        """This rank's part of a mean over all ranks' tokens, from its sums."""
        replica, step = current_replica(), current_step()
        total = tf.cast(self.total, sums.dtype)
        if replica is None or (step is not None and not self.is_masked):
            # All sequences of a batch have the same length: a rank's share of tokens is that of its rows.
            return tf.math.divide_no_nan(sums, total)
        refuse_microbatches(self.layer, "a mask and a balance loss or z-loss over the batch")
        every = all_reduce(total, replica.gradient_group, name=f"{self.layer}/tokens")
        share = 1.0 if step is None else tf.cast(step.gradient_share, sums.dtype)
        return tf.math.divide_no_nan(sums, every * share)


def count_choices(experts: tf.Tensor, num_experts: int, tokens: Tokens) -> tf.Tensor:
    """How often each expert is chosen by the included tokens: float32, [num_experts]."""
    with devices.on_host():
        if tokens.counted is not None:
            experts = tf.where(tokens.counted[:, None], experts, num_experts)
        return tf.cast(count_by_expert(experts, num_experts + 1)[:num_experts], tf.float32)


def balance_loss(counts: tf.Tensor, probabilities: tf.Tensor, tokens: Tokens) -> tf.Tensor:
    """The balance loss over the batch, which is 1 for an even load.

    Args:
        counts: How often each expert is chosen on all ranks: float32, [num_experts].
        probabilities: [tokens, num_experts].
        tokens: The included tokens.

    Source: Fedus et al. 2021, "Switch Transformers", equation 4, with shares of choices.
    """
    refuse_microbatches(tokens.layer, 'balance_over="batch"')
    loads = tf.stop_gradient(tf.math.divide_no_nan(counts, tf.reduce_sum(counts)))
    mean = tokens.mean(tokens.sum(probabilities))
    return tf.cast(tf.shape(loads)[0], loads.dtype) * tf.reduce_sum(loads * mean)


def balance_loss_of_sequences(
    experts: tf.Tensor, probabilities: tf.Tensor, tokens: Tokens, num_sequences: tf.Tensor
) -> tf.Tensor:
    """The mean over sequences of their balance losses.

    Args:
        experts: [tokens, top_k].
        probabilities: [tokens, num_experts].
        tokens: The included tokens.
        num_sequences: The number of sequences: a scalar tensor.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.
    """
    num_experts, top_k = probabilities.shape[1], experts.shape[1]
    total = tf.shape(experts)[0]
    length = total // tf.maximum(num_sequences, 1)
    with devices.on_host():
        sequence = tf.repeat(tf.range(num_sequences), length * top_k)
        flat = tf.reshape(experts, [-1]) + sequence * num_experts
        size = num_sequences * num_experts
        if tokens.counted is not None:
            flat = tf.where(tf.repeat(tokens.counted, top_k), flat, size)
        # One more bin, for the excluded choices.
        counts = count_by_expert(flat, size + 1)[:size]
        counts = tf.cast(tf.reshape(counts, [num_sequences, num_experts]), tf.float32)
    shape = [num_sequences, length, num_experts]
    sums = tf.reduce_sum(tf.reshape(tokens.only(probabilities), shape), axis=1)
    rows, parts = tf.cast(num_sequences, tf.float32), 1.0
    replica = current_replica()
    if replica is not None:
        strategy = replica.strategy
        # Ranks of the context axis have other tokens of these sequences.
        counts = all_reduce(counts, strategy.token_group, name=f"{tokens.layer}/sequences")
        if replica.step is None:
            rows = all_reduce(rows, strategy.row_group, name=f"{tokens.layer}/rows")
        else:
            parts = float(strategy.token_group.size)
    lengths = tf.reduce_sum(counts, axis=1) / top_k
    each = num_experts * tf.reduce_sum(tf.stop_gradient(counts) * sums, axis=1)
    each = tf.math.divide_no_nan(each, top_k * tf.square(lengths))
    return parts * tf.math.divide_no_nan(tf.reduce_sum(each), rows)


def router_z_loss(logits: tf.Tensor, tokens: Tokens) -> tf.Tensor:
    """The mean over tokens of the squared logarithm of the softmax's denominator.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    squares = tf.square(tf.reduce_logsumexp(logits, axis=-1))
    return tokens.mean(tokens.sum(squares))


def refuse_microbatches(layer: str, loss: str) -> None:
    """Checks that a loss over the batch is not computed in a pipeline with several micro-batches.

    Raises:
        ValueError: There are several.
    """
    step = current_step()
    count = role_of(step.model).num_microbatches if step is not None else 1
    if count > 1 and step is not None and step.kind == "train":
        raise ValueError(
            f"`{layer}` has {loss}, which is not supported in a pipeline with several micro-batches. "
            f"Received: num_microbatches={count}. "
            'Use balance_over="sequence", or num_microbatches=1.'
        )
