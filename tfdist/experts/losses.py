"""What a layer of experts adds to the loss, of the tokens of all ranks.

A step's loss is the sum over ranks of share times local loss (`tfdist.step.context`). A rank's part of a
mean over all tokens is written here such that this sum is the mean: its own sum, over all tokens
times its share. The balance loss is a product of two means; the one of counts has no gradient, so
only the counts have to be known of all ranks.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.collectives import all_reduce
from tfdist.step.context import ReplicaContext, current_replica, role_of


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens that count, among those of this rank.

    Attributes:
        layer: The layer's name, for messages.
        counted: Whether each counts: bool, [tokens]; None where all do.
        is_masked: Whether some of a sequence may not count.
        total: How many there are here: a scalar tensor.
    """

    layer: str
    counted: tf.Tensor | None
    is_masked: bool
    total: tf.Tensor

    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """The sum over tokens of values [tokens, ...]."""
        return tf.reduce_sum(self.only(values), axis=0)

    def only(self, values: tf.Tensor) -> tf.Tensor:
        """The values, with zeros where a token does not count."""
        if self.counted is None:
            return values
        counted = tf.reshape(self.counted, [-1] + [1] * (values.shape.rank - 1))
        return tf.where(counted, values, tf.zeros([], values.dtype))

    def mean(self, sums: tf.Tensor) -> tf.Tensor:
        """This rank's part of a mean over all tokens, of its sums."""
        replica = current_replica()
        if replica is None:
            return tf.math.divide_no_nan(sums, tf.cast(self.total, sums.dtype))
        total, step = tf.cast(self.total, sums.dtype), replica.step
        if step is not None and not self.is_masked:
            # All sequences of a batch are as long: a rank's share of tokens is that of its rows.
            return tf.math.divide_no_nan(sums, total)
        refuse_microbatches(
            replica, self.layer, "a mask and a balance loss or z-loss over the batch"
        )
        every = all_reduce(total, replica.gradient_group, name=f"{self.layer}/tokens")
        share = 1.0 if step is None else tf.cast(step.gradient_share, sums.dtype)
        return tf.math.divide_no_nan(sums, every * share)


def count_choices(experts: tf.Tensor, num_experts: int, tokens: Tokens) -> tf.Tensor:
    """How often each expert is chosen, by tokens that count: float32, [num_experts]."""
    if tokens.counted is not None:
        experts = tf.where(tokens.counted[:, None], experts, num_experts)
    size = num_experts + 1
    counts = tf.math.bincount(tf.reshape(experts, [-1]), minlength=size, maxlength=size)
    return tf.cast(tf.ensure_shape(counts, [size])[:num_experts], tf.float32)


def balance_loss(counts: tf.Tensor, probabilities: tf.Tensor, tokens: Tokens) -> tf.Tensor:
    """The balance loss over the batch: 1 where the load is even.

    Args:
        counts: How often each expert is chosen on all ranks: float32, [num_experts].
        probabilities: [tokens, num_experts].
        tokens: Those that count.

    Source: Fedus et al. 2021, "Switch Transformers", equation 4, of shares of choices.
    """
    replica = current_replica()
    if replica is not None:
        refuse_microbatches(replica, tokens.layer, 'balance_over="batch"')
    loads = tf.stop_gradient(tf.math.divide_no_nan(counts, tf.reduce_sum(counts)))
    mean = tokens.mean(tokens.sum(probabilities))
    return tf.cast(tf.shape(loads)[0], loads.dtype) * tf.reduce_sum(loads * mean)


def balance_loss_of_sequences(
    experts: tf.Tensor, probabilities: tf.Tensor, tokens: Tokens, num_sequences: tf.Tensor
) -> tf.Tensor:
    """The balance loss of each sequence, and their mean.

    Args:
        experts: [tokens, top_k].
        probabilities: [tokens, num_experts].
        tokens: Those that count.
        num_sequences: How many sequences the tokens are of: a scalar tensor.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.
    """
    num_experts, top_k = probabilities.shape[1], experts.shape[1]
    total = tf.shape(experts)[0]
    length = total // tf.maximum(num_sequences, 1)
    sequence = tf.repeat(tf.range(num_sequences), length * top_k)
    flat = tf.reshape(experts, [-1]) + sequence * num_experts
    size = num_sequences * num_experts
    if tokens.counted is not None:
        flat = tf.where(tf.repeat(tokens.counted, top_k), flat, size)
    # One more than there are, for what does not count.
    counts = tf.math.bincount(flat, minlength=size + 1, maxlength=size + 1)[:size]
    counts = tf.cast(tf.reshape(counts, [num_sequences, num_experts]), tf.float32)
    shape = [num_sequences, length, num_experts]
    sums = tf.reduce_sum(tf.reshape(tokens.only(probabilities), shape), axis=1)
    rows, parts = tf.cast(num_sequences, tf.float32), 1.0
    replica = current_replica()
    if replica is not None:
        strategy = replica.strategy
        # Ranks of the context axis hold other tokens of these sequences.
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


def refuse_microbatches(replica: ReplicaContext, layer: str, what: str) -> None:
    """Raises where a loss is no mean over the micro-batches of a pipeline.

    Raises:
        ValueError: There are several.
    """
    step = replica.step
    count = role_of(step.model).num_microbatches if step is not None else 1
    if count > 1 and step is not None and step.kind == "train":
        raise ValueError(
            f"`{layer}` has {what}, of which a pipeline's micro-batch sees a part. Take "
            'balance_over="sequence", or num_microbatches=1. Received: '
            f"num_microbatches={count}."
        )
