"""tfdist's Keras callbacks, in one place."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.monitoring.memory_reports import MemoryReporter as MemoryReporter
    from tfdist.addons.monitoring.model_sync import VerifyModelSync as VerifyModelSync
    from tfdist.addons.monitoring.monitor.callback import Monitor as Monitor
    from tfdist.addons.monitoring.non_finite import TerminateOnNonFinite as TerminateOnNonFinite
    from tfdist.checkpoint.checkpointer import Checkpointer as Checkpointer

_MONITORING = "tfdist.addons.monitoring"
_HOMES = {
    "Checkpointer": "tfdist.checkpoint.checkpointer",
    "MemoryReporter": f"{_MONITORING}.memory_reports",
    "Monitor": f"{_MONITORING}.monitor.callback",
    "TerminateOnNonFinite": f"{_MONITORING}.non_finite",
    "VerifyModelSync": f"{_MONITORING}.model_sync",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
