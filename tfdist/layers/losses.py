"""Cross-entropy from logits that are split over the tensor axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.products import product_behind
from tfdist.backend.keras.attributes import compile_metrics
from tfdist.backend.kernels import kernels, kernels_enabled
from tfdist.collectives import Group, all_reduce
from tfdist.collectives.mappings import copy_to_region
from tfdist.layers.chunked_loss import chunked_cross_entropy
from tfdist.layers.vocabulary import mask_padding, own_ids
from tfdist.sharding.weights import tensor_group
from tfdist.utils import checks

#: The reductions of Keras.
_REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none")


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelCrossEntropy(keras.losses.Loss):
    """Sparse categorical cross-entropy from logits, whole or split over the tensor axis.

    For split logits the ranks exchange the maximum, the sum of exponentials and the label's logit of each
    token, never the logits. The padding of the vocabulary is ignored. For whole logits this is
    `keras.losses.SparseCategoricalCrossentropy`.

    With `chunk_size` the array of all logits never exists, neither in the forward nor in the backward
    pass, if the logits are the model's last product: of `VocabParallelHead`, of a `Dense` without bias and
    activation, or of an embedding in reverse, with its soft cap (`VocabParallelEmbedding`,
    `keras.layers.ReversibleEmbedding` and thus the causal models of KerasHub). The loss then uses the hidden
    states and the table, and computes its value and both gradients for `chunk_size` tokens at a time. The
    backward pass computes the logits again: a third more products for that one layer. This requires a
    step that runs as a graph, and that nothing else, such as a metric, uses the outputs. Otherwise the
    loss is the same, computed from the logits.

    Args:
        vocabulary_size: The global number of classes, without padding.
        reduction: As for `keras.losses.Loss`.
        name: The loss's name.
        dtype: As for `keras.losses.Loss`.
        chunk_size: None, or the maximum number of tokens whose logits are in memory at once.

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
        """Maps labels [...] and logits [..., vocabulary_size or this rank's share] to losses [...].

        Raises:
            ValueError: The last dim of the logits has another size.
        """
        labels = tf.cast(tf.convert_to_tensor(y_true), devices.index_dtype())
        logits = tf.convert_to_tensor(y_pred)
        if labels.shape.rank == logits.shape.rank and labels.shape[-1] == 1:
            labels = tf.squeeze(labels, -1)
        product = None if self.chunk_size is None else product_behind(logits)
        if logits.dtype.size < 4:
            logits = tf.cast(logits, tf.float32)
        # A loss may have been made before the scope of its model.
        size, group = self.vocabulary_size, tensor_group() if self._group is None else self._group
        share = size if group is None else -(-size // group.size)
        if logits.shape[-1] == size:
            group = None
        elif logits.shape[-1] != share:
            raise ValueError(
                f"The last dim of the logits must be the vocabulary ({size}), or a tensor rank's share "
                f"of it ({share}). Received: logits of shape {tuple(logits.shape)}."
            )
        if product is not None and product.columns == logits.shape[-1]:
            return chunked_cross_entropy(product, labels, self.chunk_size, group, size)
        if group is not None:
            return _split_cross_entropy(labels, logits, group, size)
        if logits.dtype == tf.float32 and kernels_enabled():
            return _one_pass(logits, labels)
        # With other shapes TensorFlow compares their sizes, on the device.
        flat = tf.reshape(labels, [-1]), tf.reshape(logits, [-1, logits.shape[-1]])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(*flat)
        return tf.ensure_shape(tf.reshape(losses, tf.shape(logits)[:-1]), labels.shape)

    def get_config(self):
        """The configuration, which is the same on any mesh."""
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
            raise checks.refuse("dtype", dtype, "a dtype, a dtype policy or None") from error
    return dtype


def takes_split_logits(model) -> bool:
    """Whether a compiled model's loss supports split logits, and the model has no metrics."""
    metrics = compile_metrics(model, None)
    return isinstance(getattr(model, "loss", None), VocabParallelCrossEntropy) and metrics is None


def _one_pass(logits, labels):
    """The losses from whole logits, by the compiled library."""

    @custom_gradient
    def cross_entropy(logits):
        losses, gradient = kernels().tfdist_cross_entropy(logits=logits, labels=labels)
        return losses, lambda dy: dy[..., None] * gradient

    return cross_entropy(logits)


def _split_cross_entropy(labels, logits, group: Group, vocabulary_size: int):
    share = logits.shape[-1]

    @custom_gradient
    def cross_entropy(logits):
        logits = mask_padding(logits, group, vocabulary_size)
        # The maximum cancels out, also in second derivatives, which go through the rest.
        highest = tf.reduce_max(tf.stop_gradient(logits), axis=-1)
        highest = all_reduce(highest, group, "max", name="loss/maximum")
        exponentials, own_sum = _exponentials(logits, highest)
        place, own = own_ids(labels, share, group, vocabulary_size)
        of_label = tf.gather(logits, place, batch_dims=labels.shape.rank)
        of_label = tf.where(own, of_label - highest, 0.0)
        sums = tf.stack([own_sum, of_label])
        total, of_label = tf.unstack(all_reduce(sums, group, name="loss/sums"))

        def gradient(dy):
            dy = copy_to_region(dy, group, name="loss/backward")
            found = exponentials * (dy / total)[..., None]
            # Minus `dy` at the label, in the rows whose label is in this rank's range; minus 0 in others, since
            # a GPU and XLA require sizes that do not depend on the labels.
            flat, places = tf.reshape(found, [-1, share]), tf.reshape(place, [-1])
            rows = tf.cast(tf.range(tf.size(places)), places.dtype)
            indices = tf.stack([rows, places], axis=1)
            of_labels = tf.reshape(tf.where(own, dy, tf.zeros_like(dy)), [-1])
            return tf.reshape(tf.tensor_scatter_nd_sub(flat, indices, of_labels), tf.shape(logits))

        return tf.math.log(total) - of_label, gradient

    return cross_entropy(logits)


def _exponentials(logits, highest) -> tuple:
    """exp(logits - highest), and the sum of each row."""
    if logits.dtype == tf.float32 and kernels_enabled():
        return kernels().tfdist_exponentials(logits=logits, highest=highest)
    exponentials = tf.exp(logits - highest[..., None])
    return exponentials, tf.reduce_sum(exponentials, axis=-1)
