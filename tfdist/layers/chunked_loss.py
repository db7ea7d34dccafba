"""Cross-entropy from hidden states and a table in chunks of tokens, without all logits at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.products import Product
from tfdist.collectives import Group, all_reduce
from tfdist.collectives.engine import shape_of
from tfdist.collectives.mappings import copy_to_region
from tfdist.context_parallel.blockwise.grid import padded
from tfdist.layers.vocabulary import mask_padding, own_ids


def chunked_cross_entropy(
    product: Product, labels, chunk_size: int, group: Group | None, vocabulary_size: int
):
    """The cross-entropy of each token, from the factors of its logits.

    The backward pass computes the logits again, and from them the gradients of hidden states and table,
    chunk by chunk. Only one chunk's logits and their gradients exist at a time; the gradient of the table
    is summed over chunks in float32. Ranks of a split vocabulary exchange the maximum, the sum of
    exponentials and the label's logit of each token, once for all chunks.

    Args:
        product: The factors of the logits, which have shape [..., vocabulary or this rank's range of it].
        labels: Shape [...], int32.
        chunk_size: The maximum number of tokens in a chunk.
        group: The ranks over which the vocabulary is split, or None.
        vocabulary_size: The global number of classes.

    Returns:
        A tensor of shape [...], float32, or float64 if the hidden states are.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", and Hsu et al.
    2024, "Liger Kernel", which use the same chunks.
    """
    rows = tf.reshape(product.rows, [-1, product.features])
    flat = tf.reshape(labels, [-1])
    (tokens,) = shape_of(flat)
    # Chunks of equal size need the least padding.
    at_least_one = max if isinstance(tokens, int) else tf.maximum
    number = at_least_one(1, -(-tokens // chunk_size))
    size = at_least_one(1, -(-tokens // number))
    wide = tf.float64 if rows.dtype == tf.float64 else tf.float32
    chunks = _Chunks(product, group, vocabulary_size, wide, number, size)
    losses = _cross_entropy(rows, flat, chunks)
    return tf.ensure_shape(tf.reshape(losses, tf.shape(labels)), labels.shape)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """The computation of one chunk, and the order of all.

    Attributes:
        product: As for `chunked_cross_entropy`.
        group: As for `chunked_cross_entropy`.
        vocabulary_size: As for `chunked_cross_entropy`.
        wide: The dtype of the logits.
        number: The number of chunks, an int or a scalar tensor.
        size: The number of tokens in a chunk, an int or a scalar tensor.
    """

    product: Product
    group: Group | None
    vocabulary_size: int
    wide: tf.DType
    number: int | tf.Tensor
    size: int | tf.Tensor

    def split(self, tensor) -> tf.TensorArray:
        """The chunks of a tensor, of which the last is padded with zeros."""
        inner = tensor.shape[1:]
        tensor = padded(tensor, self.number * self.size, 0)
        tensor = tf.reshape(tensor, [self.number, self.size, *inner])
        shape = [self.size if isinstance(self.size, int) else None, *inner]
        return tf.TensorArray(
            tensor.dtype, self.number, clear_after_read=False, element_shape=shape
        ).unstack(tensor)

    def join(self, found: tf.TensorArray, like):
        """The tensor of given chunks, without the padding."""
        whole = tf.reshape(found.stack(), [-1, *like.shape[1:]])
        return whole[: tf.shape(like)[0]]

    def loop(self, body, *carried) -> Any:
        """Calls `body(index, *carried)` for one chunk at a time: TensorFlow would start all at once."""
        _, *carried = tf.while_loop(
            lambda i, *_: i < self.number,
            lambda i, *carried: (i + 1, *body(i, *carried)),
            (0, *carried),
            parallel_iterations=1,
        )
        return carried

    def logits(self, rows, kernel):
        """A chunk's logits, and the slope of the soft cap at each; None without a cap."""
        logits = tf.matmul(rows, kernel, transpose_b=self.product.transposed)
        slope = None
        if self.product.soft_cap is not None:
            cap = tf.cast(self.product.soft_cap, logits.dtype)
            capped = tf.tanh(logits / cap)
            logits = capped * cap
            slope = 1.0 - tf.square(tf.cast(capped, self.wide))
        logits = tf.cast(logits, self.wide)
        if self.group is not None:
            logits = mask_padding(logits, self.group, self.vocabulary_size)
        return logits, slope

    def statistics(self, logits, labels) -> list:
        """A chunk's losses; of a split vocabulary maxima, sums of exponentials, labels' logits."""
        if self.group is None:
            return [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)]
        highest = tf.reduce_max(logits, axis=-1)
        total = tf.reduce_sum(tf.exp(logits - highest[:, None]), axis=-1)
        place, own = own_ids(labels, logits.shape[-1], self.group, self.vocabulary_size)
        of_label = tf.where(own, tf.gather(logits, place, batch_dims=1), 0.0)
        return [highest, total, of_label]

    def losses(self, losses, *others) -> tuple:
        """The losses, and the log-sum-exp over all classes of a split vocabulary, from `statistics`."""
        if self.group is None:
            return losses, None
        highest, (total, of_label) = losses, others
        over_all = all_reduce(highest, self.group, "max", name="loss/maximum")
        sums = tf.stack([total * tf.exp(highest - over_all), of_label])
        total, of_label = tf.unstack(all_reduce(sums, self.group, name="loss/sums"))
        lse = over_all + tf.math.log(total)
        return lse - of_label, lse

    def logit_gradient(self, logits, labels, lse):
        """Probabilities, minus 1 at the label."""
        if self.group is None and not devices.has_gpu():
            return tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
                features=logits, labels=labels
            ).backprop
        if self.group is None:
            # On GPUs the operation above raises an error if operations have to be deterministic.
            return tf.nn.softmax(logits) - tf.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        place, own = own_ids(labels, logits.shape[-1], self.group, self.vocabulary_size)
        # -1 is not a class: the row is zero if another rank has the label.
        hot = tf.one_hot(tf.where(own, place, -1), logits.shape[-1], dtype=logits.dtype)
        return tf.exp(logits - lse[:, None]) - hot


def _cross_entropy(rows, labels, chunks: _Chunks):
    @custom_gradient
    def cross_entropy(rows, kernel):
        hidden, classes = chunks.split(rows), chunks.split(labels)

        def forward(i, *found):
            logits, _ = chunks.logits(hidden.read(i), kernel)
            parts = chunks.statistics(logits, classes.read(i))
            return [into.write(i, part) for into, part in zip(found, parts, strict=True)]

        count = 1 if chunks.group is None else 3
        empty = [tf.TensorArray(chunks.wide, chunks.number) for _ in range(count)]
        found = chunks.loop(forward, *empty)
        losses, lse = chunks.losses(*(chunks.join(part, labels) for part in found))

        def backward(of_losses):
            if chunks.group is not None:
                of_losses = copy_to_region(of_losses, chunks.group, name="loss/backward")
            hidden, classes, weights = map(chunks.split, (rows, labels, of_losses))
            lses = None if lse is None else chunks.split(lse)
            transposed = chunks.product.transposed

            def step(i, of_rows, of_kernel):
                own = hidden.read(i)
                logits, slope = chunks.logits(own, kernel)
                gradient = chunks.logit_gradient(logits, classes.read(i), lses and lses.read(i))
                gradient *= weights.read(i)[:, None]
                if slope is not None:
                    gradient *= slope
                gradient = tf.cast(gradient, rows.dtype)
                of_row = tf.matmul(gradient, kernel, transpose_b=not transposed)
                first, second = (gradient, own) if transposed else (own, gradient)
                of_kernel += tf.cast(tf.matmul(first, second, transpose_a=True), chunks.wide)
                return of_rows.write(i, of_row), of_kernel

            of_rows, of_kernel = chunks.loop(
                step, tf.TensorArray(rows.dtype, chunks.number), tf.zeros_like(kernel, chunks.wide)
            )
            return chunks.join(of_rows, rows), tf.cast(of_kernel, kernel.dtype)

        return losses, backward

    return cross_entropy(rows, chunks.product.kernel)
