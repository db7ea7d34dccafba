"""Dropout and its kin: ranks that hold different samples draw different numbers."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import SeedGenerator
from tfdist.step.context import current_replica

#: Odd, so that no two ranks' seeds fall together; far from the steps by which Keras counts.
_STRIDE = 0x9E3779B1


def _next(self, ordered=True, *, original):
    """Moves the drawn seed by the place of the rank's samples; the state itself stays equal.

    Ranks of one tensor group hold the same samples and share the place, so they drop alike.
    """
    seed = original(self, ordered)
    replica = current_replica()
    place = 0 if replica is None else replica.strategy.gradient_group.rank
    if place == 0:
        return seed
    offset = (place * _STRIDE) % (1 << 31)
    return seed + tf.constant([offset, 0], dtype=seed.dtype)


PATCHES = (Patch(SeedGenerator, "next", ("self", "ordered"), _next),)
