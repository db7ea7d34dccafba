"""Checks of layers under a strategy with a context axis."""

from __future__ import annotations

import keras

from tfdist.sharding.weights import tensor_group, token_group


def check_whole_slices(layer: keras.layers.Layer, sequence_parallel: bool) -> None:
    """Checks that a layer does not split sequences over both the tensor axis and the context axis.

    Raises:
        ValueError: The layer does.
    """
    group = token_group()
    if sequence_parallel and group is not None and tensor_group() is not None:
        raise ValueError(
            f"`{layer.name}` cannot split sequences over both the tensor axis and the context axis. "
            f"Received: sequence_parallel=True on a context axis of {group.size} ranks. Omit "
            "`sequence_parallel`: the context axis splits all activations already."
        )


def check_attention(
    layer: keras.layers.Layer, kind: str, heads: int, key_heads: int, dropout: float
) -> None:
    """Checks that an attention layer is supported on the context axis.

    Args:
        layer: The layer.
        kind: The way in which ranks exchange keys and values.
        heads: The number of query heads on this rank.
        key_heads: The number of key/value heads on this rank.
        dropout: The fraction of attention weights that are dropped.

    Raises:
        ValueError: The layer is not supported.
    """
    group = token_group()
    if group is None:
        return
    if dropout:
        raise ValueError(
            f"`{layer.name}` cannot drop attention weights, of which a rank of a context axis has only a "
            f"part. Received: dropout={dropout}. Set it to 0; for a block or a model pass "
            "attention_dropout=0."
        )
    if kind == "ulysses" and not _heads_divide(heads, key_heads, group.size):
        raise ValueError(
            f'`{layer.name}` requires numbers of heads that context_attention="ulysses" can split equally '
            f"over the context axis. Received: {heads} query heads and {key_heads} key/value heads on a "
            f"tensor rank, and a context axis of {group.size} ranks. Use "
            'context_attention="ring", which supports any number of heads.'
        )


def _heads_divide(heads: int, key_heads: int, parts: int) -> bool:
    # If there are fewer key/value heads than ranks, several ranks receive a copy.
    return heads % parts == 0 and (key_heads % parts == 0 or parts % key_heads == 0)
