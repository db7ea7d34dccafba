"""tfdist's Keras callbacks, in one place."""

from tfdist.checkpoint import Checkpointer
from tfdist.monitoring import MemoryReporter, TerminateOnNonFinite, VerifyModelSync

__all__ = ["Checkpointer", "MemoryReporter", "TerminateOnNonFinite", "VerifyModelSync"]
