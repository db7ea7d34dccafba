"""What the queries of a rank have to do with the keys and values of one rank of the context axis."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.context_parallel.blockwise import (
    Visibility,
    attention_gradients,
    attention_parts,
    default_settings,
    merge,
)
from tfdist.context_parallel.masks import Masks
from tfdist.step.token_split import TokenSplit


def in_turn(so_far):
    """Inside, nothing begins before a nest of tensors is there, or None.

    What is computed with one rank's keys needs nothing of another's: TensorFlow would begin with all, and
    their blocks of queries would stand together.
    """
    return tf.control_dependencies([t for t in tf.nest.flatten(so_far) if t is not None])


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Attention of this rank's queries, of two whole chunks, to the keys of one rank at a time.

    With causal attention, of two other ranks' chunks an early one sees the early one before it, and a
    late one both of those behind it: half of all pairs, whichever ranks they are. So all ranks have
    equally much to compute.

    Attributes:
        tokens: The split.
        causal: Whether a query sees only keys up to its own place.
        masks: What else is not seen.
        scale: What scores are multiplied by.
    """

    tokens: TokenSplit
    causal: bool
    masks: Masks
    scale: float

    def _parts(self, source: int) -> tuple[int, int]:
        """The first chunk of the queries that see keys of `source`, and how many chunks they see."""
        if not self.causal or source == self.tokens.place:
            return 0, 2
        return (0, 1) if source < self.tokens.place else (1, 2)

    def _seen(self, source: int, first_query: int, last_key: int):
        # The chunks of a rank stand in the order of the sequence.
        causal = self.causal and source == self.tokens.place
        mask = self.masks.of(source, first_query, last_key)
        by_query = causal or (mask is not None and mask.shape[2] != 1)
        return Visibility(causal, 0, mask), default_settings(self.scale, by_query=by_query)

    def attend(self, query, key, value, source: int, before):
        """Attends to the keys of one rank.

        Args:
            query: Shape [batch, heads, 2 chunks, size].
            key: Shape [batch, groups, 2 chunks, size].
            value: Of that shape.
            source: The place of the rank that they are of.
            before: Output and log-sum-exp over other ranks' keys, or None.

        Returns:
            Those of all so far; see `attention_parts`.
        """
        first, last = self._parts(source)
        chunk = self.tokens.chunk
        seen, settings = self._seen(source, first, last)
        key, value = key[:, :, : last * chunk], value[:, :, : last * chunk]
        found = attention_parts(query[:, :, first * chunk :], key, value, seen, settings)
        if before is None:
            return found
        if first == 0:
            return merge(before, found)
        late = merge([tensor[:, :, chunk:] for tensor in before], found)
        return [
            tf.concat([early[:, :, :chunk], tensor], axis=2)
            for early, tensor in zip(before, late, strict=True)
        ]

    def gradients(self, rows, key, value, source: int):
        """What the keys of one rank add to the gradients.

        Args:
            rows: The query, the gradient of the output, the log-sum-exp over all ranks' keys and delta;
                see `attention_gradients`.
            key: As in `attend`.
            value: As there.
            source: As there.

        Returns:
            The addends to the gradients of the query, of the key and of the value, of whole shape.
        """
        first, last = self._parts(source)
        chunk = self.tokens.chunk
        seen, settings = self._seen(source, first, last)
        query, gradient, lse, delta = (tensor[:, :, first * chunk :] for tensor in rows)
        key, value = key[:, :, : last * chunk], value[:, :, : last * chunk]
        of_query, of_key, of_value = attention_gradients(
            query, key, value, gradient, lse, delta, seen, settings
        )
        if first:
            of_query = tf.pad(of_query, [[0, 0], [0, 0], [chunk, 0], [0, 0]])
        if last == 1:
            behind = [[0, 0], [0, 0], [0, chunk], [0, 0]]
            of_key, of_value = tf.pad(of_key, behind), tf.pad(of_value, behind)
        return of_query, of_key, of_value
