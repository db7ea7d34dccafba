"""Dropout and similar layers: ranks with different samples draw different numbers."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import SeedGenerator
from tfdist.step.context import current_replica

PATCHES = Patches()

#: Odd, so that the seeds of two ranks never coincide; far from the steps by which Keras counts.
_STRIDE = 0x9E3779B1


@PATCHES.of(SeedGenerator, "__init__")
def _init(self, *args, original, **kwargs):
    """Creates the state on the host, whose kernels read it."""
    with devices.on_host():
        original(self, *args, **kwargs)


@PATCHES.of(SeedGenerator, "next")
def _next(self, ordered=True, *, original):
    """Offsets the drawn seed by the place of the rank's samples; the state stays equal on all ranks.

    Ranks of one tensor group have the same samples and the same place, so they draw the same numbers. Kernels
    of a GPU read seeds from the host.
    """
    with devices.on_host():
        seed = original(self, ordered)
        replica = current_replica()
        place = 0 if replica is None else replica.strategy.gradient_group.rank
        offset = (place * _STRIDE) % (1 << 31)
        seed = seed + tf.constant([offset, 0], dtype=seed.dtype) if place else seed
        # Keras casts it, on the device if it has another dtype.
        return tf.cast(seed, tf.int32) if devices.has_gpu() else seed
