"""Watching a run: the watchdog and its heartbeats, memory in use, and whether ranks still agree."""

from tfdist.monitoring.adaptive_batch import AdaptiveBatch
from tfdist.monitoring.compression import compression_statistics
from tfdist.monitoring.expert_load import ExpertLoad, parameter_counts
from tfdist.monitoring.gradient_noise import GradientNoise
from tfdist.monitoring.memory_report import MemoryReporter, memory_report
from tfdist.monitoring.model_sync import VerifyModelSync
from tfdist.monitoring.monitor.callback import Monitor
from tfdist.monitoring.non_finite import TerminateOnNonFinite
from tfdist.step_clock import timer

__all__ = [
    "AdaptiveBatch",
    "ExpertLoad",
    "GradientNoise",
    "MemoryReporter",
    "Monitor",
    "TerminateOnNonFinite",
    "VerifyModelSync",
    "compression_statistics",
    "memory_report",
    "parameter_counts",
    "timer",
]
