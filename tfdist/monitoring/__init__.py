"""Watching a run: the watchdog and the roll call that it speaks over, and how much memory is used."""

from tfdist.monitoring.memory import PeakMemory, bytes_in_use
from tfdist.monitoring.watchdog import Watchdog, startup_guard

__all__ = ["PeakMemory", "Watchdog", "bytes_in_use", "startup_guard"]
