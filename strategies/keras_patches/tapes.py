"""Gradient tapes: the gradients that a custom step reads are those of the global batch."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.tapes import passing
from tfdist.backend.keras.patching import Patches
from tfdist.step.context import current_replica

PATCHES = Patches()


@PATCHES.of(tf.GradientTape, "gradient")
def _gradient(self, target, sources, *args, original, **kwargs):
    """Returns gradients of the global batch to steps that read them, and not those of this rank."""
    replica = current_replica()
    with passing(sources):
        if replica is None or replica.gradient_reads is None:
            return original(self, target, sources, *args, **kwargs)
        return replica.gradient_reads.gradient(original, self, target, sources, *args, **kwargs)
