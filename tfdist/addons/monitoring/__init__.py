"""Monitoring of training: step times, memory use, checks that ranks agree, and reports."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.monitoring.expert_load import ExpertLoad as ExpertLoad
    from tfdist.addons.monitoring.expert_load import parameter_counts as parameter_counts
    from tfdist.addons.monitoring.memory_reports import memory_report as memory_report
    from tfdist.addons.monitoring.segment_seconds import measure_seconds as measure_seconds
    from tfdist.addons.monitoring.timeline import save_timeline as save_timeline
    from tfdist.backend.clock.stamps import timer as timer

#: Loaded lazily: they need TensorFlow, without which `tfdist-report` reads files.
_HOMES = {
    "ExpertLoad": "tfdist.addons.monitoring.expert_load",
    "measure_seconds": "tfdist.addons.monitoring.segment_seconds",
    "memory_report": "tfdist.addons.monitoring.memory_reports",
    "parameter_counts": "tfdist.addons.monitoring.expert_load",
    "save_timeline": "tfdist.addons.monitoring.timeline",
    "timer": "tfdist.backend.clock.stamps",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
