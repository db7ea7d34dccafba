"""Attention to keys and values that are gathered from all ranks first.

Source: Llama team 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.raw import raw_all_gather, raw_reduce_scatter
from tfdist.layers.context_parallel.pairs import Pairs

__all__ = ["gathered_forward", "gathered_gradients"]


def gathered_forward(query, key, value, pairs: Pairs, group: Group, name: str):
    """As `ring_forward`."""
    found = None
    whole = _gathered(key, value, group, name)
    for source in range(group.size):
        key, value = _of(whole, source, key.shape[-1], found)
        found = pairs.attend(query, key, value, source, found)
    return found


def gathered_gradients(rows, key, value, pairs: Pairs, group: Group, name: str):
    """As `ring_gradients`; keys and values are gathered anew, so that none are kept."""
    size = key.shape[-1]
    whole = _gathered(key, value, group, name)
    of_query, of_columns = None, []
    for source in range(group.size):
        key, value = _of(whole, source, size, of_query)
        of_rows, *found = pairs.gradients(rows, key, value, source)
        of_query = of_rows if of_query is None else of_query + of_rows
        of_columns.append(tf.concat(found, axis=-1))
    own = raw_reduce_scatter(tf.stack(of_columns), group, "sum", f"{name}/gradients")[0]
    return of_query, own[..., :size], own[..., size:]


def _gathered(key, value, group: Group, name: str) -> tf.Tensor:
    both = tf.concat([key, value], axis=-1)[None]
    return raw_all_gather(both, group, False, f"{name}/keys")


def _of(whole, source: int, size: int, so_far):
    """The keys and values of a rank, once what is computed with others is there."""
    after = [tensor for tensor in tf.nest.flatten(so_far) if tensor is not None]
    with tf.control_dependencies(after):
        found = tf.identity(whole[source])
    return found[..., :size], found[..., size:]
