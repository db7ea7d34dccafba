"""Which positions of a sequence belong to which rank of the context axis, and who may compute so."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.graph.compiling import outside_clusters
from tfdist.backend.keras.private import Functional
from tfdist.collectives import Group, all_reduce
from tfdist.step.token_split import TokenSplit

#: Layers that compute each token by itself.
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
#: Layers that do so where their axis is the last dim.
_ALONG_AN_AXIS = (
    keras.layers.Softmax,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.BatchNormalization,
    keras.layers.Concatenate,
)


def _is_tokenwise(layer: keras.layers.Layer) -> bool:
    # What derives from a layer may compute something else, as SpatialDropout1D does.
    if type(layer) is keras.layers.Dropout:
        return layer.noise_shape is None
    if type(layer) in _ALONG_AN_AXIS:
        return layer.axis in (-1, [-1], (-1,))
    return type(layer) in _TOKENWISE


def check_tokenwise(model: keras.Model, layers) -> None:
    """Raises for a layer that would mix tokens of which each rank holds a part.

    A layer of one's own says that it can by the attribute `splits_tokens = True`.

    Args:
        model: The model, for the message.
        layers: All layers in it.

    Raises:
        ValueError: There is one, or the model has an input of a fixed length.
    """
    for tensor in tf.nest.flatten(getattr(model, "inputs", None) or []):
        if len(tensor.shape) > 1 and tensor.shape[1] is not None:
            raise ValueError(
                f"`{model.name}` has an input of a fixed length, of which each rank of the context axis "
                f"sees a part. Received: shape {tuple(tensor.shape)}. Leave the length open, as in "
                "`keras.Input((None,))`."
            )
    for layer in layers:
        # Functional and sequential models only call their layers.
        is_container = isinstance(layer, keras.Model) and not _has_own_call(layer)
        if not (is_container or getattr(layer, "splits_tokens", False) or _is_tokenwise(layer)):
            raise ValueError(
                f"`{layer.name}` ({type(layer).__name__}) of `{model.name}` may mix tokens of a "
                "sequence, of which each rank of the context axis holds a part. Leave `context` at 1 "
                "in the mesh, or, where the layer computes each token by itself, set "
                "`splits_tokens = True` on it."
            )


def shard_tokens(dataset: tf.data.Dataset, num_shards: int, index: int) -> tf.data.Dataset:
    """Returns the data set whose batches have this rank's positions of each sequence.

    Args:
        dataset: Yields nests of dense tensors whose dim 1 is the sequence; components of rank 1 are
            left as they are.
        num_shards: The number of ranks that share a sequence.
        index: This rank's place among them.

    Raises:
        ValueError: As `own_tokens`.
    """
    is_tuple = type(dataset.element_spec) is tuple

    @outside_clusters
    def take(*batch):
        own = own_tokens(batch, num_shards, index)
        return own if is_tuple else own[0]

    return dataset.map(take)


def own_tokens(batch, num_shards: int, index: int, *, even: bool = False):
    """This rank's positions of the sequences of a batch, in zigzag chunks (`TokenSplit`).

    The sizes that are known afterwards are the same on all ranks. Where the tokens do not divide into
    two equal chunks a rank, their number is left open.

    Args:
        batch: The batch.
        num_shards: The number of ranks that share a sequence.
        index: This rank's place among them.
        even: Whether the tokens have to divide so.

    Raises:
        ValueError: A component is not dense, its dim 1 is another than that of the others, or is too
            short.
        InvalidArgumentError: In the run, where sizes are not known before.
    """
    sizes = {
        part.shape[1]
        for part in tf.nest.flatten(batch)
        if part is not None and hasattr(part, "shape") and len(part.shape) > 1
    } - {None}
    if len(sizes) > 1 or any(isinstance(part, _NOT_DENSE) for part in tf.nest.flatten(batch)):
        raise ValueError(
            "A context axis splits dim 1 of all dense tensors of a batch, which is the sequence. "
            f"Received: {tf.nest.map_structure(lambda part: getattr(part, 'shape', part), batch)}."
        )

    def take(part):
        if part is None or len(part.shape) < 2:
            return part
        size = part.shape[1]
        if size is None:
            size = tf.shape(part)[1]
        split = TokenSplit(num_shards, index, size)
        part = _checked(part, split, even)
        own = split.take(part)
        if split.is_even:
            return own
        # Another rank may have another number, so this one's is not to be known to a graph.
        open_shape = [own.shape[0], None, *own.shape[2:]]
        return tf.raw_ops.PlaceholderWithDefault(input=own, shape=open_shape)

    return tf.nest.map_structure(take, batch)


_NOT_DENSE = (tf.RaggedTensor, tf.SparseTensor)


def _checked(part, split: TokenSplit, even: bool):
    """The whole sequences, once they are known to be long enough."""
    parts = split.parts
    what = f"Each of the {parts} ranks of the context axis has at least one token of a sequence"
    if even and not split.is_even:
        raise ValueError(
            f"A batch by itself has sequences that divide into {2 * parts} chunks, two for each of the "
            f"{parts} ranks of the context axis; `fit`, `evaluate` and `predict` take any length. "
            f"Received: {split.total} tokens."
        )
    if isinstance(split.total, int):
        if split.lacks_ranks:
            raise ValueError(
                f"{what}. Received: {split.total} tokens; take a smaller `context` in the mesh."
            )
        return part
    said = [what, "Received tokens:", split.total]
    with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(split.lacks_ranks), said)]):
        return tf.identity(part)


def agreed_split(values, group: Group, *, sizes_agree: bool) -> TokenSplit | None:
    """How the sequences are split of which ranks hold the given parts.

    Args:
        values: A nest of tensors; the first with two dims or more has this rank's tokens as dim 1.
        group: The ranks of the context axis. All call this.
        sizes_agree: Whether a size that is known to a graph is that of every rank, as it is of what
            `own_tokens` makes. Where it is not, as of a rank's own eager tensor, the run fails.

    Returns:
        The split; None if no tensor has tokens.
    """
    for part in tf.nest.flatten(values):
        if isinstance(part, tf.Tensor) and part.shape.rank is not None and part.shape.rank > 1:
            break
    else:
        return None
    total = all_reduce(tf.shape(part)[1], group, name="tokens")
    count = part.shape[1]
    if count is None or tf.executing_eagerly() or not sizes_agree:
        return TokenSplit(group.size, group.rank, total)
    split = TokenSplit(group.size, group.rank, group.size * count)
    said = (
        "A graph for tokens of a known number has as many on each rank of the context axis, in two "
        "equal chunks. Pass it an iterator over the distributed data set, and not eager tensors; or "
        f"pad sequences to a multiple of {2 * group.size}"
    )
    if not split.is_even:
        raise ValueError(f"{said}. Received: {count} tokens on this rank.")
    tf.debugging.assert_equal(total, split.total, said)
    return split


def _has_own_call(model: keras.Model) -> bool:
    return type(model).call is not Functional.call and not isinstance(model, keras.Sequential)
