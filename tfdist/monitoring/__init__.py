"""Watching a run: the watchdog and the roll call that it speaks over, and how much memory is used."""

from tfdist.monitoring.memory import PeakMemory, bytes_in_use
from tfdist.monitoring.memory_report import (
    MemoryReport,
    MemoryReporter,
    MemoryRow,
    memory_report,
)
from tfdist.monitoring.model_sync import ModelSyncError, VerifyModelSync, verify_model_sync
from tfdist.monitoring.non_finite import TerminateOnNonFinite
from tfdist.monitoring.watchdog import Watchdog, startup_guard

__all__ = [
    "MemoryReport",
    "MemoryReporter",
    "MemoryRow",
    "ModelSyncError",
    "PeakMemory",
    "TerminateOnNonFinite",
    "VerifyModelSync",
    "Watchdog",
    "bytes_in_use",
    "memory_report",
    "startup_guard",
    "verify_model_sync",
]
