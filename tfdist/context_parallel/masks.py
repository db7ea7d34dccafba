"""What the queries of a rank see of the keys of another."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import Call, run
from tfdist.step.token_split import TokenSplit


def padded(tensor: tf.Tensor, size, axis: int) -> tf.Tensor:
    """The tensor with zeros (or False) behind it, up to `size` along `axis`."""
    if isinstance(size, int) and tensor.shape[axis] == size:
        return tensor
    paddings = [[0, 0]] * len(tensor.shape)
    paddings[axis] = [0, size - tf.shape(tensor)[axis]]
    return tf.pad(tensor, paddings)


class Masks:
    """The masks of pairs of ranks, by what a user gives and by where the sequence ends.

    Args:
        tokens: The split.
        group: The ranks.
        causal: Whether a query sees only keys up to its own place.
        keys: None, or bool of shape [batch or 1, tokens of this rank]: whether its keys are seen.
        pairs: None, or bool of shape [batch or 1, tokens of this rank, tokens of the sequence]: what
            its queries see.
        name: For messages.
    """

    def __init__(
        self, tokens: TokenSplit, group: Group, causal: bool, keys: Any, pairs: Any, name: str
    ):
        self._tokens = tokens
        whole = 2 * tokens.chunk
        self._keys = self._pairs = None
        if keys is not None:
            gather = Call("all_gather", group, f"{name}/key-mask")
            self._keys = run(gather, padded(keys, whole, 1)[None])
        if pairs is not None:
            pairs = padded(pairs, whole, 1)
            self._pairs = padded(pairs, tokens.parts * whole, 2)
        # What stands behind the sequence a causal query never sees.
        self._has_end = not causal and not tokens.is_even and keys is None and pairs is None

    def of(self, source: int, first_query: int, last_key: int) -> tf.Tensor | None:
        """What is seen of the keys of a rank.

        Args:
            source: The rank's place.
            first_query: 0 for all of this rank's queries, 1 for those of its second chunk.
            last_key: 2 for all keys of the other rank, 1 for those of its first chunk.

        Returns:
            None for all, or bool of shape [batch or 1, 1, queries or 1, keys].
        """
        if self._keys is None and self._pairs is None and not self._has_end:
            return None
        chunk = self._tokens.chunk
        begins = [source * chunk, (2 * self._tokens.parts - 1 - source) * chunk][:last_key]
        found: Any = None
        if self._keys is not None:
            found = self._keys[source][:, None, None, : last_key * chunk]
        if self._pairs is not None:
            rows = self._pairs[:, first_query * chunk :]
            parts = [rows[:, :, begin : begin + chunk] for begin in begins]
            seen = tf.concat(parts, axis=2)[:, None]
            found = seen if found is None else tf.logical_and(found, seen)
        if self._has_end:
            places = tf.concat([tf.range(begin, begin + chunk) for begin in begins], axis=0)
            found = (places < self._tokens.total)[None, None, None]
        return found
