"""The split of a sequence over the ranks of the context axis, in zigzag chunks."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The split of a sequence into 2P chunks, of which rank i holds chunks i and 2P-1-i.

    With causal attention later tokens cost more. An early and a late chunk balance the work of the ranks.

    All chunks have the same size, except that chunks at the end of the sequence may be shorter or empty. So
    the tokens that a rank lacks compared with two full chunks are always at the end of its part.

    Attributes:
        parts: The number of ranks, P.
        place: This rank's place among them.
        total: The number of tokens of the sequence: an int, or an int32 scalar tensor.

    Source: Brandon et al. 2023, "Striped Attention"; the order of chunks is that of Megatron-LM's context
    parallelism.
    """

    parts: int
    place: int
    total: int | tf.Tensor

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have the same number of tokens."""
        return isinstance(self.total, int) and self.total % (2 * self.parts) == 0

    @property
    def chunk(self) -> int | tf.Tensor:
        """The size of a full chunk."""
        return -(-self.total // (2 * self.parts))

    @property
    def lacks_ranks(self) -> bool | tf.Tensor:
        """Whether a rank has no token at all."""
        return (self.parts - 1) * self.chunk >= self.total

    def bounds(self, place: int | None = None) -> list[tuple]:
        """The begin and end in the sequence of the two chunks of a rank (default: this one)."""
        place = self.place if place is None else place
        begins = [chunk * self.chunk for chunk in (place, 2 * self.parts - 1 - place)]
        least = min if isinstance(self.total, int) else tf.minimum
        return [(least(b, self.total), least(b + self.chunk, self.total)) for b in begins]

    def count(self, place: int | None = None) -> int | tf.Tensor:
        """The number of tokens of a rank (default: this one)."""
        return sum(end - begin for begin, end in self.bounds(place))

    def positions(self, place: int | None = None) -> tf.Tensor:
        """The positions of a rank's tokens in the sequence: int32 of shape [count]."""
        return tf.concat([tf.range(begin, end) for begin, end in self.bounds(place)], axis=0)

    def take(self, whole, axis: int = 1) -> tf.Tensor:
        """This rank's tokens of a tensor with all tokens along `axis`."""
        before = (slice(None),) * axis
        return tf.concat([whole[(*before, slice(*chunk))] for chunk in self.bounds()], axis=axis)

    def in_order(self, joined: tf.Tensor, axis: int = 1) -> tf.Tensor:
        """Reorders the tokens of all ranks, concatenated along `axis`, to the order of the sequence."""
        places = tf.concat([self.positions(place) for place in range(self.parts)], axis=0)
        return tf.gather(joined, tf.math.invert_permutation(places), axis=axis)
