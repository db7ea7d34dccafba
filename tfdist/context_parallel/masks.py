"""Masks of the queries of a rank and the keys of another."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import Call, run
from tfdist.context_parallel.blockwise.grid import padded
from tfdist.step.token_split import TokenSplit


class Arguments(NamedTuple):
    """The arguments of `context_attention`, with the mask as one of keys or of pairs.

    Attributes:
        tokens: The split of the sequence.
        group: The ranks.
        causal: Whether a query sees only keys up to its own position.
        keys: None, or bool of shape [batch or 1, tokens of this rank]: whether its keys are seen.
        pairs: None, or bool of shape [batch or 1, tokens of this rank, tokens of the sequence]: the keys
            that its queries see.
        starts: None, or float32 of shape [batch, tokens of this rank]: the place in the sequence of the
            first key that each of its queries sees.
        scale: The factor of scores.
        name: For messages.
    """

    tokens: TokenSplit
    group: Group
    causal: bool
    keys: Any
    pairs: Any
    starts: Any
    scale: float
    name: str

    def gather_mask(self, mask, name: str):
        """A mask of this rank's tokens (dim 1), padded to whole chunks, from all ranks along a new dim 0."""
        call = Call("all_gather", self.group, f"{self.name}/{name}")
        return run(call, padded(mask, 2 * self.tokens.chunk, 1)[None])


class Masks:
    """The masks of pairs of ranks: the user's, and the end of the sequence."""

    def __init__(self, given: Arguments):
        self._tokens = tokens = given.tokens
        whole = 2 * tokens.chunk
        self._starts = None if given.starts is None else padded(given.starts, whole, 1)
        self._keys = self._pairs = None
        if given.keys is not None:
            self._keys = given.gather_mask(given.keys, "key-mask")
        if given.pairs is not None:
            self._pairs = padded(padded(given.pairs, whole, 1), tokens.parts * whole, 2)
        # A causal query never sees the padding after the sequence.
        has_mask = given.keys is not None or given.pairs is not None
        self._has_end = not (given.causal or tokens.is_even or has_mask)

    def _begins(self, source: int, last_key: int) -> list:
        """The places in the sequence of the first tokens of a rank's chunks."""
        chunk = self._tokens.chunk
        return [source * chunk, (2 * self._tokens.parts - 1 - source) * chunk][:last_key]

    def starts(self, source: int, first_query: int, last_key: int) -> tuple:
        """The least place that each query sees, and the places of a rank's keys: see `of`, `Visibility`."""
        if self._starts is None:
            return None, None
        chunk = self._tokens.chunk
        places = [tf.range(begin, begin + chunk) for begin in self._begins(source, last_key)]
        return self._starts[:, first_query * chunk :], tf.cast(tf.concat(places, 0), tf.float32)

    def of(self, source: int, first_query: int, last_key: int) -> tf.Tensor | None:
        """The mask of a rank's keys.

        Args:
            source: The rank's place.
            first_query: 0 for all of this rank's queries, 1 for those of its second chunk.
            last_key: 2 for all keys of the other rank, 1 for those of its first chunk.

        Returns:
            None for all, or bool of shape [batch or 1, 1, queries or 1, keys].
        """
        chunk = self._tokens.chunk
        begins = self._begins(source, last_key)
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
