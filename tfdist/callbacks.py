"""tfdist's Keras callbacks, in one place."""

from tfdist.checkpoint import Checkpointer
from tfdist.monitoring import (
    AdaptiveBatch,
    ExpertLoad,
    GradientNoise,
    MemoryReporter,
    Monitor,
    TerminateOnNonFinite,
    VerifyModelSync,
)

__all__ = [
    "AdaptiveBatch",
    "Checkpointer",
    "ExpertLoad",
    "GradientNoise",
    "MemoryReporter",
    "Monitor",
    "TerminateOnNonFinite",
    "VerifyModelSync",
]
