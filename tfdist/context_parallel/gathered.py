"""Attention to keys and values that are gathered from all ranks first.

Source: Llama team 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import Call, run
from tfdist.context_parallel.pairs import Pairs, in_turn


def gathered_forward(query, key, value, pairs: Pairs, group: Group, name: str):
    """As `ring_forward`."""
    found = None
    whole = _gathered(key, value, group, name)
    for source in range(group.size):
        with in_turn(found):
            key, value = tf.unstack(whole[source], num=2)
            found = pairs.attend(query, key, value, source, found)
    return found


def gathered_gradients(rows, key, value, pairs: Pairs, group: Group, name: str):
    """As `ring_gradients`; keys and values are gathered anew, so that none are kept."""
    whole = _gathered(key, value, group, name)
    of_query: Any = None
    of_columns: list = []
    for source in range(group.size):
        with in_turn(of_query):
            key, value = tf.unstack(whole[source], num=2)
            of_rows, *found = pairs.gradients(rows, key, value, source)
        of_query = of_rows if of_query is None else of_query + of_rows
        of_columns.append(tf.stack(found))
    every = tf.stack(of_columns)
    scatter = Call("reduce_scatter", group, f"{name}/gradients", "sum")
    of_key, of_value = tf.unstack(run(scatter, every)[0], num=2)
    return of_query, of_key, of_value


def _gathered(key, value, group: Group, name: str) -> tf.Tensor:
    # Along dim 0, so that what is taken of it is no copy.
    return run(Call("all_gather", group, f"{name}/keys"), tf.stack([key, value])[None])
