"""Attention to keys and values that are gathered from all ranks first.

Source: Llama team 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import Call, run


class Gathered:
    """The keys and values of one rank after the other, and their gradients; see `Ring`.

    The backward pass gathers keys and values again, so that they are not kept.
    """

    def __init__(self, key, value, group: Group, name: str):
        self._group, self._name = group, name
        # Along dim 0, so that the parts are views and not copies.
        self._columns = run(Call("all_gather", group, f"{name}/keys"), tf.stack([key, value])[None])
        self._source = 0
        self._gradients: list = []

    def next(self) -> tuple:
        """Keys, values and the place of their rank."""
        source = self._source
        self._source += 1
        return *tf.unstack(self._columns[source], num=2), source

    def add(self, gradients: list) -> None:
        """Adds this rank's part of the gradients of the keys and values that `next` returned last."""
        self._gradients.append(tf.stack(gradients))

    def gradients(self) -> list:
        """The gradients of this rank's keys and values, summed over ranks."""
        scatter = Call("reduce_scatter", self._group, f"{self._name}/gradients", "sum")
        return tf.unstack(run(scatter, tf.stack(self._gradients))[0], num=2)
