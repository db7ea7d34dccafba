"""Gradient tapes: what a step of the user's own reads of gradients is of the global batch."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.tapes import passing
from tfdist.backend.keras.patching import Patch
from tfdist.step.context import current_replica


def _gradient(self, target, sources, *args, original, **kwargs):
    """Without it a step that clips, logs or adds up gradients would take this rank's for those of all."""
    replica = current_replica()
    with passing(sources):
        if replica is None or replica.gradient_reads is None:
            return original(self, target, sources, *args, **kwargs)
        return replica.gradient_reads.gradient(original, self, target, sources, *args, **kwargs)


PATCHES = (Patch(tf.GradientTape, "gradient", ("self", "target", "sources"), _gradient),)
