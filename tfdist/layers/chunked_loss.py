"""Cross-entropy from hidden states and a table, some tokens at a time: without all logits at once."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.products import Product
from tfdist.collectives import Group, all_reduce


class _Split(NamedTuple):
    """This rank's range of the vocabulary.

    Attributes:
        group: The ranks that have the others.
        first: The first class of the range.
        real: How many classes of it are no padding.
    """

    group: Group
    first: int
    real: int


def chunked_cross_entropy(
    product: Product, labels, chunk_size: int, group: Group | None, vocabulary_size: int
):
    """The cross-entropy of each token, from what its logits are made of.

    The backward pass makes the logits again, and of them the gradients of hidden states and table,
    chunk by chunk. Logits and their gradients stand for one chunk alone; the gradient of the table is
    summed over chunks as float32. Ranks of a split vocabulary exchange the maximum, the sum of
    exponentials and the label's logit of each token, once for all chunks.

    Args:
        product: What makes the logits, of shape [..., vocabulary or this rank's range of it].
        labels: Shape [...], of int32.
        chunk_size: The most tokens of a chunk.
        group: None, or the ranks over which the vocabulary is split.
        vocabulary_size: The global number of classes.

    Returns:
        A tensor of shape [...], of float32, or of float64 as the hidden states.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", and Hsu et al.
    2024, "Liger Kernel", which chunk so too.
    """
    split = None
    if group is not None:
        share = product.columns or 0
        first = group.rank * share
        split = _Split(group, first, min(max(vocabulary_size - first, 0), share))
    rows = tf.reshape(product.rows, [-1, product.features])
    flat = tf.reshape(labels, [-1])
    tokens = flat.shape[0] if flat.shape[0] is not None else tf.size(flat)
    # As many chunks as it takes, all of one size, so that little is filled up with zeros.
    at_least_one = max if isinstance(tokens, int) else tf.maximum
    number = at_least_one(1, -(-tokens // chunk_size))
    size = at_least_one(1, -(-tokens // number))
    losses = _cross_entropy(rows, product, flat, number, size, split)
    return tf.ensure_shape(tf.reshape(losses, tf.shape(labels)), labels.shape)


def _cross_entropy(rows, product: Product, labels, number, size, split: _Split | None):
    wide = tf.float64 if rows.dtype == tf.float64 else tf.float32

    def chunks(tensor):
        """The chunks, the last of which is filled up with zeros."""
        lacking = number * size - tf.shape(tensor)[0]
        inner = tensor.shape[1:]
        tensor = tf.pad(tensor, [[0, lacking], *[[0, 0]] * len(inner)])
        tensor = tf.reshape(tensor, [number, size, *inner])
        own = [size if isinstance(size, int) else None, *inner]
        return tf.TensorArray(
            tensor.dtype, number, clear_after_read=False, element_shape=own
        ).unstack(tensor)

    def joined(found: tf.TensorArray, like):
        whole = tf.reshape(found.stack(), [-1, *like.shape[1:]])
        return whole[: tf.shape(like)[0]]

    @custom_gradient
    def cross_entropy(rows, kernel):
        hidden, classes = chunks(rows), chunks(labels)

        def forward(i, *found):
            logits, _ = _logits(hidden.read(i), kernel, product, split, wide)
            parts = _statistics(logits, classes.read(i), split)
            return i + 1, *(into.write(i, part) for into, part in zip(found, parts, strict=True))

        empty = [tf.TensorArray(wide, number) for _ in range(1 if split is None else 3)]
        _, *found = _loop(number, forward, (0, *empty))
        parts = [joined(part, labels) for part in found]
        losses, lse = (parts[0], None) if split is None else _over_ranks(parts, split)

        def backward(of_losses):
            weights = chunks(of_losses)
            again = chunks(rows)
            lses = None if lse is None else chunks(lse)

            def step(i, of_rows, of_kernel):
                own, label = again.read(i), classes_again.read(i)
                logits, slope = _logits(own, kernel, product, split, wide)
                gradient = _logit_gradient(logits, label, lses and lses.read(i), split)
                gradient *= weights.read(i)[:, None]
                if slope is not None:
                    gradient *= slope
                gradient = tf.cast(gradient, rows.dtype)
                of_row = tf.matmul(gradient, kernel, transpose_b=not product.transposed)
                first, second = (gradient, own) if product.transposed else (own, gradient)
                of_kernel += tf.cast(tf.matmul(first, second, transpose_a=True), wide)
                return i + 1, of_rows.write(i, of_row), of_kernel

            classes_again = chunks(labels)
            begin = (0, tf.TensorArray(rows.dtype, number), tf.zeros_like(kernel, wide))
            _, of_rows, of_kernel = _loop(number, step, begin)
            return joined(of_rows, rows), tf.cast(of_kernel, kernel.dtype)

        return losses, backward

    return cross_entropy(rows, product.kernel)


def _loop(number, body, carried):
    # One at a time: TensorFlow would begin all chunks at once.
    return tf.while_loop(lambda i, *_: i < number, body, carried, parallel_iterations=1)


def _logits(rows, kernel, product: Product, split: _Split | None, wide):
    """A chunk's logits, and the slope of the cap at each; None without a cap."""
    logits = tf.matmul(rows, kernel, transpose_b=product.transposed)
    slope = None
    if product.soft_cap is not None:
        capped = tf.tanh(logits / tf.cast(product.soft_cap, logits.dtype))
        logits = capped * tf.cast(product.soft_cap, logits.dtype)
        capped = tf.cast(capped, wide)
        slope = 1.0 - tf.square(capped)
    logits = tf.cast(logits, wide)
    if split is not None and split.real < (product.columns or 0):
        padding = tf.range(product.columns) >= split.real
        logits = tf.where(padding, logits.dtype.min, logits)
    return logits, slope


def _statistics(logits, labels, split: _Split | None) -> list:
    """The losses of a chunk; of a split vocabulary maxima, sums of exponentials, labels' logits."""
    if split is None:
        return [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)]
    highest = tf.reduce_max(logits, axis=-1)
    total = tf.reduce_sum(tf.exp(logits - highest[:, None]), axis=-1)
    own, place = _own(labels, logits, split)
    of_label = tf.where(own, tf.gather(logits, place, batch_dims=1), 0.0)
    return [highest, total, of_label]


def _over_ranks(parts: list, split: _Split) -> tuple:
    """The losses, and the log-sum-exp over all classes."""
    highest, total, of_label = parts
    over_all = all_reduce(highest, split.group, "max", name="loss/maximum")
    sums = tf.stack([total * tf.exp(highest - over_all), of_label])
    total, of_label = tf.unstack(all_reduce(sums, split.group, name="loss/sums"))
    lse = over_all + tf.math.log(total)
    return lse - of_label, lse


def _logit_gradient(logits, labels, lse, split: _Split | None):
    """Probabilities, less 1 at the label."""
    if split is None:
        return tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=logits, labels=labels
        ).backprop
    own, place = _own(labels, logits, split)
    # -1 is no class: where the label is another rank's the row is zero.
    hot = tf.one_hot(tf.where(own, place, -1), logits.shape[-1], dtype=logits.dtype)
    return tf.exp(logits - lse[:, None]) - hot


def _own(labels, logits, split: _Split) -> tuple:
    """Whether labels are in this rank's range, and their place there."""
    place = labels - split.first
    own = tf.logical_and(place >= 0, place < logits.shape[-1])
    return own, tf.where(own, place, 0)
