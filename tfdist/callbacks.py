"""tfdist's Keras callbacks, in one place."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.monitoring.expert_load import ExpertLoad as ExpertLoad
    from tfdist.addons.monitoring.memory_reports import MemoryReporter as MemoryReporter
    from tfdist.addons.monitoring.model_sync import VerifyModelSync as VerifyModelSync
    from tfdist.addons.monitoring.monitor.callback import Monitor as Monitor
    from tfdist.addons.monitoring.non_finite import TerminateOnNonFinite as TerminateOnNonFinite
    from tfdist.addons.unequal_ranks.adaptive_batch import AdaptiveBatch as AdaptiveBatch
    from tfdist.addons.unequal_ranks.gradient_noise import GradientNoise as GradientNoise
    from tfdist.checkpoint.checkpointer import Checkpointer as Checkpointer

_MONITORING, _UNEQUAL_RANKS = "tfdist.addons.monitoring", "tfdist.addons.unequal_ranks"
_HOMES = {
    "AdaptiveBatch": f"{_UNEQUAL_RANKS}.adaptive_batch",
    "Checkpointer": "tfdist.checkpoint.checkpointer",
    "ExpertLoad": f"{_MONITORING}.expert_load",
    "GradientNoise": f"{_UNEQUAL_RANKS}.gradient_noise",
    "MemoryReporter": f"{_MONITORING}.memory_reports",
    "Monitor": f"{_MONITORING}.monitor.callback",
    "TerminateOnNonFinite": f"{_MONITORING}.non_finite",
    "VerifyModelSync": f"{_MONITORING}.model_sync",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
