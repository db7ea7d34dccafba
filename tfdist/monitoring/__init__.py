"""Watching a run: the watchdog and its heartbeats, memory in use, and whether ranks still agree."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.backend.clock.stamps import timer
    from tfdist.compression.statistics import compression_statistics as compression_statistics
    from tfdist.monitoring.adaptive_batch import AdaptiveBatch as AdaptiveBatch
    from tfdist.monitoring.expert_load import ExpertLoad as ExpertLoad
    from tfdist.monitoring.expert_load import parameter_counts as parameter_counts
    from tfdist.monitoring.gradient_noise import GradientNoise as GradientNoise
    from tfdist.monitoring.memory_reports import MemoryReporter as MemoryReporter
    from tfdist.monitoring.memory_reports import memory_report as memory_report
    from tfdist.monitoring.model_sync import VerifyModelSync as VerifyModelSync
    from tfdist.monitoring.monitor.callback import Monitor as Monitor
    from tfdist.monitoring.non_finite import TerminateOnNonFinite as TerminateOnNonFinite

#: By name the module that has it. They need TensorFlow, which `tfdist-report` reads files without.
_PLACES = {
    "AdaptiveBatch": "tfdist.monitoring.adaptive_batch",
    "ExpertLoad": "tfdist.monitoring.expert_load",
    "GradientNoise": "tfdist.monitoring.gradient_noise",
    "MemoryReporter": "tfdist.monitoring.memory_reports",
    "Monitor": "tfdist.monitoring.monitor.callback",
    "TerminateOnNonFinite": "tfdist.monitoring.non_finite",
    "VerifyModelSync": "tfdist.monitoring.model_sync",
    "compression_statistics": "tfdist.compression.statistics",
    "memory_report": "tfdist.monitoring.memory_reports",
    "parameter_counts": "tfdist.monitoring.expert_load",
    "timer": "tfdist.backend.clock.stamps",
}

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


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
