"""Cross-entropy over logits that stay split over the tensor axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.products import product_behind
from tfdist.backend.keras.attributes import compile_metrics
from tfdist.backend.kernels import kernels, kernels_enabled
from tfdist.collectives import Group, all_reduce
from tfdist.layers.chunked_loss import chunked_cross_entropy
from tfdist.sharding.weights import tensor_group
from tfdist.utils import checks

#: Those of Keras.
_REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none")


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelCrossEntropy(keras.losses.Loss):
    """Sparse categorical cross-entropy from logits, whole or split over the tensor axis.

    On split logits the ranks exchange the maximum, the sum of exponentials and the label's logit
    of each token, never the logits. The padding of a vocabulary that does not divide counts for
    nothing. On whole logits this is `keras.losses.SparseCategoricalCrossentropy`.

    With `chunk_size` the logits never stand as a whole, neither forward nor backward, where they are
    the model's last product: of `VocabParallelHead`, of a `Dense` without bias and activation, or of an
    embedding in reverse, with its soft cap (`VocabParallelEmbedding`, `keras.layers.ReversibleEmbedding`
    and so the causal models of KerasHub). The loss then takes the hidden states and the table that
    they are made of, and computes its value and both gradients so many tokens at a time. The
    backward pass makes the logits again: a third more products for that one layer. This is so in
    steps that run as a graph, and where nothing else, as a metric, looks at the outputs. Everywhere
    else the loss is the same, of logits as they are.

    Args:
        vocabulary_size: The global number of classes, without padding.
        reduction: As for `keras.losses.Loss`.
        name: The loss's name.
        dtype: As for `keras.losses.Loss`.
        chunk_size: None, or of how many tokens at most logits stand at once.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        vocabulary_size: int,
        reduction="sum_over_batch_size",
        name="vocab_parallel_cross_entropy",
        dtype=None,
        *,
        chunk_size: int | None = None,
    ):
        vocabulary_size = checks.integer("vocabulary_size", vocabulary_size, minimum=1)
        checks.text("name", name, optional=True)
        checks.one_of("reduction", reduction, _REDUCTIONS, optional=True)
        super().__init__(name=name, reduction=reduction, dtype=_check_dtype(dtype))
        self.vocabulary_size = vocabulary_size
        self.chunk_size = checks.integer("chunk_size", chunk_size, minimum=1, optional=True)
        self._group = tensor_group()

    def call(self, y_true, y_pred):
        """Labels [...] and logits [..., vocabulary_size or this rank's share] to losses [...].

        Raises:
            ValueError: The last dim of the logits is neither.
        """
        labels = tf.cast(tf.convert_to_tensor(y_true), tf.int32)
        logits = tf.convert_to_tensor(y_pred)
        if labels.shape.rank == logits.shape.rank and labels.shape[-1] == 1:
            labels = tf.squeeze(labels, -1)
        product = None if self.chunk_size is None else product_behind(logits)
        if logits.dtype.size < 4:
            logits = tf.cast(logits, tf.float32)
        size = self._group.size if self._group is not None else 1
        share = -(-self.vocabulary_size // size)
        is_whole = logits.shape[-1] == self.vocabulary_size
        is_split = self._group is not None and logits.shape[-1] == share
        if product is not None and product.columns == logits.shape[-1] and (is_whole or is_split):
            return chunked_cross_entropy(
                product,
                labels,
                self.chunk_size,
                None if is_whole else self._group,
                self.vocabulary_size,
            )
        if is_whole:
            if logits.dtype == tf.float32 and kernels_enabled():
                return _one_pass(logits, labels)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        if self._group is None or logits.shape[-1] != share:
            raise ValueError(
                f"The last dim of the logits is the vocabulary ({self.vocabulary_size}), or a "
                f"tensor rank's share of it ({share}). Received: logits of shape "
                f"{tuple(logits.shape)}."
            )
        return _split_cross_entropy(labels, logits, self._group, self.vocabulary_size)

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "chunk_size": self.chunk_size,
        }


def _check_dtype(dtype):
    if dtype is not None:
        try:
            keras.dtype_policies.get(dtype)
        except (ValueError, TypeError, AttributeError) as error:
            raise checks.refuse("dtype", dtype, "a dtype, a policy of dtypes or None") from error
    return dtype


def takes_split_logits(model) -> bool:
    """Whether all that a compiled model does with its output takes split logits."""
    metrics = compile_metrics(model, None)
    return isinstance(getattr(model, "loss", None), VocabParallelCrossEntropy) and metrics is None


def _one_pass(logits, labels):
    """On whole logits, by the compiled library."""

    @custom_gradient
    def cross_entropy(logits):
        losses, gradient = kernels().tfdist_cross_entropy(logits=logits, labels=labels)
        return losses, lambda dy: dy[..., None] * gradient

    return cross_entropy(logits)


def _split_cross_entropy(labels, logits, group: Group, vocabulary_size: int):
    share = logits.shape[-1]
    first = group.rank * share

    @custom_gradient
    def cross_entropy(logits):
        real = min(max(vocabulary_size - first, 0), share)
        if real < share:
            padding = tf.range(share) >= real
            logits = tf.where(padding, logits.dtype.min, logits)
        highest = all_reduce(tf.reduce_max(logits, axis=-1), group, "max", name="loss/maximum")
        exponentials, own_sum = _exponentials(logits, highest)
        own_labels = labels - first
        own = tf.logical_and(own_labels >= 0, own_labels < share)
        place = tf.where(own, own_labels, 0)
        of_label = tf.gather(logits, place, batch_dims=labels.shape.rank)
        of_label = tf.where(own, of_label - highest, 0.0)
        sums = tf.stack([own_sum, of_label])
        total, of_label = tf.unstack(all_reduce(sums, group, name="loss/sums"))

        def gradient(dy):
            found = exponentials * (dy / total)[..., None]
            # Less `dy` at the label, in the rows whose label is this rank's.
            rows = tf.where(tf.reshape(own, [-1]))
            places = tf.gather(tf.reshape(place, [-1, 1]), rows[:, 0])
            indices = tf.concat([rows, tf.cast(places, rows.dtype)], axis=1)
            of_labels = tf.gather(tf.reshape(dy, [-1]), rows[:, 0])
            flat = tf.reshape(found, [-1, share])
            return tf.reshape(tf.tensor_scatter_nd_sub(flat, indices, of_labels), tf.shape(logits))

        return tf.math.log(total) - of_label, gradient

    return cross_entropy(logits)


def _exponentials(logits, highest) -> tuple:
    """exp(logits - highest), and the sum of each row."""
    if logits.dtype == tf.float32 and kernels_enabled():
        return kernels().tfdist_exponentials(logits=logits, highest=highest)
    exponentials = tf.exp(logits - highest[..., None])
    return exponentials, tf.reduce_sum(exponentials, axis=-1)
