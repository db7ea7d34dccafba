"""What a context axis asks of a layer, refused by the layer's name."""

from __future__ import annotations

import keras

from tfdist.sharding.weights import tensor_group, token_group


def check_whole_slices(layer: keras.layers.Layer, sequence_parallel: bool) -> None:
    """Refuses slices of sequences over the tensor axis beside those over the context axis.

    Raises:
        ValueError: There are both.
    """
    group = token_group()
    if sequence_parallel and group is not None and tensor_group() is not None:
        raise ValueError(
            f"`{layer.name}` gets slices of a sequence over the tensor axis or over the context axis, "
            f"not both. Received: sequence_parallel=True on a context axis of {group.size} ranks. Leave "
            "`sequence_parallel` out: the context axis splits all activations already."
        )


def check_attention(
    layer: keras.layers.Layer, kind: str, heads: int, key_heads: int, dropout: float
) -> None:
    """Refuses an attention layer that the context axis cannot compute.

    Args:
        layer: The layer.
        kind: How keys and values get to the queries of other ranks.
        heads: The number of query heads on this rank.
        key_heads: The number of key/value heads on this rank.
        dropout: The share of attention weights that is dropped.

    Raises:
        ValueError: It cannot.
    """
    group = token_group()
    if group is None:
        return
    if dropout:
        raise ValueError(
            f"`{layer.name}` drops attention weights, which no rank of a context axis holds as a whole. "
            f"Received: dropout={dropout}. Set it to 0 there; a block or a model takes "
            "attention_dropout=0."
        )
    if kind == "ulysses" and not _heads_divide(heads, key_heads, group.size):
        raise ValueError(
            f"`{layer.name}` gives each rank of the context axis an equal part of the heads. Received: "
            f"{heads} query heads and {key_heads} key/value heads on a tensor rank, and a context axis "
            f'of {group.size} ranks. Take context_attention="ring", which takes any number of heads.'
        )


def _heads_divide(heads: int, key_heads: int, parts: int) -> bool:
    # Of fewer key/value heads than ranks, several ranks get a copy.
    return heads % parts == 0 and (key_heads % parts == 0 or parts % key_heads == 0)
