"""Watching a run: the watchdog, and the roll call that it speaks over."""

from tfdist.monitoring.watchdog import Watchdog, startup_guard

__all__ = ["Watchdog", "startup_guard"]
