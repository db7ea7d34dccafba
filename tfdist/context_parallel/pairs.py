"""Attention of the queries of a rank to the keys and values of one rank of the context axis."""

from __future__ import annotations

import tensorflow as tf

from tfdist.context_parallel.blockwise import (
    Visibility,
    attention_gradients,
    attention_parts,
    default_settings,
    merge,
)
from tfdist.context_parallel.masks import Arguments, Masks


def in_turn(so_far):
    """A context in which no operation starts before a nest of tensors, or None, is computed.

    The computations with different ranks' keys are independent: TensorFlow would start all of them, and
    their blocks of queries would be in memory at once.
    """
    return tf.control_dependencies([t for t in tf.nest.flatten(so_far) if t is not None])


class Pairs:
    """Attention of this rank's queries, of two whole chunks, to the keys of one rank at a time.

    With causal attention, both of this rank's chunks see only the first chunk of an earlier rank, and
    only the second of its chunks sees a later rank's, of which it sees both: half of all pairs for any
    two ranks. So all ranks have the same amount to compute.
    """

    def __init__(self, given: Arguments):
        self._given, self._masks = given, Masks(given)

    def _seen(self, source: int) -> tuple:
        """The first chunk of queries that see keys of a rank, the number of chunks of keys, and the rest.

        The rest are the last two arguments of `attention_parts`.
        """
        causal, place = self._given.causal, self._given.tokens.place
        first, last = 0, 2
        if causal and source != place:
            first, last = (0, 1) if source < place else (1, 2)
        # The chunks of a rank are in the order of the sequence.
        causal = causal and source == place
        mask = self._masks.of(source, first, last)
        starts, places = self._masks.starts(source, first, last)
        seen = Visibility(causal, 0, mask, starts, places)
        return first, last, (seen, default_settings(self._given.scale, by_query=seen.by_query))

    def attend(self, query, columns: tuple, before):
        """Attends to the keys of one rank.

        Args:
            query: Shape [batch, heads, 2 chunks, size].
            columns: Keys and values, both of shape [batch, groups, 2 chunks, size], and the place of their
                rank.
            before: Output and log-sum-exp over other ranks' keys, or None.

        Returns:
            Output and log-sum-exp over the keys of all ranks so far; see `attention_parts`.
        """
        key, value, source = columns
        first, last, seen = self._seen(source)
        chunk = self._given.tokens.chunk
        key, value = key[:, :, : last * chunk], value[:, :, : last * chunk]
        found = attention_parts(query[:, :, first * chunk :], key, value, *seen)
        if before is None:
            return found
        if first == 0:
            return merge(before, found)
        late = merge([tensor[:, :, chunk:] for tensor in before], found)
        return [
            tf.concat([early[:, :, :chunk], tensor], axis=2)
            for early, tensor in zip(before, late, strict=True)
        ]

    def gradients(self, rows, columns: tuple):
        """Computes the contribution of the keys of one rank to the gradients.

        Args:
            rows: The query, the gradient of the output, the log-sum-exp over all ranks' keys and delta;
                see `attention_gradients`.
            columns: As in `attend`.

        Returns:
            The contributions to the gradients of the query, of the key and of the value, in their shapes.
        """
        key, value, source = columns
        first, last, seen = self._seen(source)
        chunk = self._given.tokens.chunk
        query, gradient, lse, delta = (tensor[:, :, first * chunk :] for tensor in rows)
        key, value = key[:, :, : last * chunk], value[:, :, : last * chunk]
        of_query, of_key, of_value = attention_gradients(
            query, key, value, gradient, lse, delta, *seen
        )
        if first:
            of_query = tf.pad(of_query, [[0, 0], [0, 0], [chunk, 0], [0, 0]])
        if last == 1:
            behind = [[0, 0], [0, 0], [0, chunk], [0, 0]]
            of_key, of_value = tf.pad(of_key, behind), tf.pad(of_value, behind)
        return of_query, of_key, of_value
