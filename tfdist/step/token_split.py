"""How the ranks of the context axis divide a sequence: in zigzag chunks."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The cut of a sequence into 2P chunks, of which rank i has chunks i and 2P-1-i.

    With causal attention a token costs more the later it comes. Of an early and a late chunk each
    rank has as much to compute as the others.

    All chunks have one size but for the end of the sequence: the last may be shorter or empty. So
    the tokens that a rank lacks of two whole chunks are always at the end of what it has.

    Attributes:
        parts: The number of ranks, P.
        place: This rank's place among them.
        total: The number of tokens of the sequence: an int, or an int32 scalar tensor.

    Source: Brandon et al. 2023, "Striped Attention"; Megatron-LM's context parallelism, whose order
    of chunks this is.
    """

    parts: int
    place: int
    total: int | tf.Tensor

    @property
    def is_even(self) -> bool:
        """Whether it is known that all ranks have equally many tokens."""
        return isinstance(self.total, int) and self.total % (2 * self.parts) == 0

    @property
    def chunk(self) -> int | tf.Tensor:
        """The size of a whole chunk."""
        return -(-self.total // (2 * self.parts))

    @property
    def lacks_ranks(self) -> bool | tf.Tensor:
        """Whether a rank has no token at all."""
        return (self.parts - 1) * self.chunk >= self.total

    def bounds(self, place: int | None = None) -> list[tuple]:
        """Begin and end, in the sequence, of the two chunks of a rank (default: this one)."""
        place = self.place if place is None else place
        found = []
        for chunk in (place, 2 * self.parts - 1 - place):
            begin = chunk * self.chunk
            found.append((_least(begin, self.total), _least(begin + self.chunk, self.total)))
        return found

    def count(self, place: int | None = None) -> int | tf.Tensor:
        """How many tokens a rank has (default: this one)."""
        return sum(end - begin for begin, end in self.bounds(place))

    def positions(self, place: int | None = None) -> tf.Tensor:
        """Where a rank's tokens stand in the sequence: int32 of shape [count]."""
        return tf.concat([tf.range(begin, end) for begin, end in self.bounds(place)], axis=0)

    def take(self, whole, axis: int = 1) -> tf.Tensor:
        """This rank's tokens of a tensor that has all of them along `axis`."""
        before = (slice(None),) * axis
        return tf.concat([whole[(*before, slice(*chunk))] for chunk in self.bounds()], axis=axis)

    def in_order(self, joined: tf.Tensor, axis: int = 1) -> tf.Tensor:
        """The tokens of all ranks, rank after rank along `axis`, in the order of the sequence."""
        places = tf.concat([self.positions(place) for place in range(self.parts)], axis=0)
        return tf.gather(joined, tf.math.invert_permutation(places), axis=axis)


def _least(first, second):
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    return tf.minimum(first, second)
