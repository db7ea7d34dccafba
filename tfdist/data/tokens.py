"""The positions of a sequence for each rank of the context axis, and the layers that support the split."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.keras.private import Functional
from tfdist.collectives import Group, all_reduce
from tfdist.data.sharding import map_elements
from tfdist.step.token_split import TokenSplit

#: Layers that compute each token separately.
_TOKENWISE = (
    keras.layers.InputLayer,
    keras.layers.Embedding,
    keras.layers.Dense,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
#: Layers that do so if their axis is the last dim.
_ALONG_AN_AXIS = (
    keras.layers.Softmax,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.BatchNormalization,
    keras.layers.Concatenate,
)


def _is_tokenwise(layer: keras.layers.Layer) -> bool:
    # Derived layers may mix tokens, such as SpatialDropout1D.
    if type(layer) is keras.layers.Dropout:
        return layer.noise_shape is None
    if type(layer) in _ALONG_AN_AXIS:
        return layer.axis in (-1, [-1], (-1,))
    return type(layer) in _TOKENWISE


def check_tokenwise(model: keras.Model, layers) -> None:
    """Checks that no layer mixes tokens, of which each rank holds a part.

    A custom layer declares that it supports the split by the attribute `splits_tokens = True`.

    Args:
        model: The model, for the message.
        layers: All layers in it.

    Raises:
        ValueError: A layer may mix tokens, or the model has an input of a fixed length.
    """
    for tensor in tf.nest.flatten(getattr(model, "inputs", None) or []):
        if len(tensor.shape) > 1 and tensor.shape[1] is not None:
            raise ValueError(
                f"`{model.name}` has an input of a fixed length, which is not supported with a context axis: "
                f"each rank holds a part of the sequence. Received: shape {tuple(tensor.shape)}. Use None for "
                "the length, as in `keras.Input((None,))`."
            )
    for layer in layers:
        # Functional and sequential models only call their layers.
        is_container = type(layer).call is Functional.call or isinstance(layer, keras.Sequential)
        if not (is_container or getattr(layer, "splits_tokens", False) or _is_tokenwise(layer)):
            raise ValueError(
                f"`{layer.name}` ({type(layer).__name__}) of `{model.name}` is not supported with a context "
                "axis: it may mix tokens of a sequence, of which each rank holds a part. Use `context=1` in "
                "the mesh, or, if the layer computes each token separately, set `splits_tokens = True` on it."
            )


def shard_tokens(dataset: tf.data.Dataset, num_shards: int, index: int) -> tf.data.Dataset:
    """Returns a dataset whose batches have this rank's positions of each sequence.

    Args:
        dataset: Yields nests of dense tensors with the sequence along dim 1; components of rank 1 are not
            changed.
        num_shards: The number of ranks that share a sequence.
        index: This rank's place among them.

    Raises:
        ValueError: As `own_tokens`.
    """
    return map_elements(dataset, lambda batch: own_tokens(batch, num_shards, index))


def own_tokens(batch, num_shards: int, index: int):
    """This rank's positions of the sequences of a batch, in zigzag chunks (`TokenSplit`).

    Sizes that are known in the result are the same on all ranks. The number of tokens is unknown unless it is
    a multiple of twice the number of ranks.

    Args:
        batch: The batch.
        num_shards: The number of ranks that share a sequence.
        index: This rank's place among them.

    Raises:
        ValueError: A component is not dense, its dim 1 differs from that of the others, or is too short.
        InvalidArgumentError: The same, at run time, if sizes are not known before.
    """
    parts = tf.nest.flatten(batch)
    sizes = {part.shape[1] for part in parts if hasattr(part, "shape") and len(part.shape) > 1}
    is_dense = not any(isinstance(part, (tf.RaggedTensor, tf.SparseTensor)) for part in parts)
    if len(sizes - {None}) > 1 or not is_dense:
        raise ValueError(
            "A context axis requires batches of dense tensors with the same size along dim 1, the sequence. "
            f"Received: {tf.nest.map_structure(lambda part: getattr(part, 'shape', part), batch)}."
        )

    def take(part):
        if part is None or len(part.shape) < 2:
            return part
        size = part.shape[1]
        split = TokenSplit(num_shards, index, tf.shape(part)[1] if size is None else size)
        part = _checked(part, split)
        own = split.take(part)
        if split.is_even:
            return own
        # The number may differ between ranks, so graphs must not assume this one.
        open_shape = [own.shape[0], None, *own.shape[2:]]
        return tf.raw_ops.PlaceholderWithDefault(input=own, shape=open_shape)

    return tf.nest.map_structure(take, batch)


def _checked(part, split: TokenSplit):
    """The whole sequences, after a check that they are long enough."""
    parts = split.parts
    rule = (
        f"Each of the {parts} ranks of the context axis requires at least one token of a sequence"
    )
    if not isinstance(split.total, int):
        is_long_enough = tf.logical_not(split.lacks_ranks)
        check = tf.debugging.Assert(is_long_enough, [rule, "Received tokens:", split.total])
        with tf.control_dependencies([check]):
            return tf.identity(part)
    if split.lacks_ranks:
        raise ValueError(
            f"Cannot split the sequence: {rule}. Received: {split.total} tokens. Use a "
            "smaller `context` in the mesh."
        )
    return part


def agreed_split(values, group: Group, *, sizes_agree: bool) -> TokenSplit | None:
    """Determines the split of sequences from the parts that the ranks hold.

    Args:
        values: A nest of tensors; the first with at least two dims has this rank's tokens along dim 1.
        group: The ranks of the context axis. All of them must call this.
        sizes_agree: Whether a size that is known in a graph is the same on all ranks, as in results of
            `own_tokens`. If it differs, as for eager tensors of each rank, the run fails.

    Returns:
        The split; None if no tensor has tokens.
    """
    tensors = (part for part in tf.nest.flatten(values) if isinstance(part, tf.Tensor))
    part = next((each for each in tensors if (each.shape.rank or 0) > 1), None)
    if part is None:
        return None
    total = all_reduce(tf.shape(part)[1], group, name="tokens")
    count = part.shape[1]
    if count is None or tf.executing_eagerly() or not sizes_agree:
        return TokenSplit(group.size, group.rank, total)
    split = TokenSplit(group.size, group.rank, group.size * count)
    rule = (
        "a graph with a known number of tokens requires the same number on each rank of the context axis, in "
        "two equal chunks"
    )
    remedy = (
        "Pass an iterator over the distributed dataset, and not eager tensors, or pad sequences to a multiple "
        f"of {2 * group.size}"
    )
    if not split.is_even:
        raise ValueError(
            f"Cannot split the sequence: {rule}. Received: {count} tokens on this rank. {remedy}."
        )
    with devices.on_host():
        tf.debugging.assert_equal(total, split.total, f"{rule}. {remedy}.")
    return split
