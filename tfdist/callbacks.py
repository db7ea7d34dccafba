"""tfdist's Keras callbacks, in one place."""

from tfdist.checkpoint import Checkpointer
from tfdist.monitoring import (
    ExpertLoad,
    MemoryReporter,
    Monitor,
    TerminateOnNonFinite,
    VerifyModelSync,
)

__all__ = [
    "Checkpointer",
    "ExpertLoad",
    "MemoryReporter",
    "Monitor",
    "TerminateOnNonFinite",
    "VerifyModelSync",
]
