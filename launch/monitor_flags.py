"""The flags of what watches a training."""

from __future__ import annotations

import math
from typing import Any

from tfdist.launch.flag_values import (
    FlagDefiner,
    UsageError,
    input_file,
    output_file,
    refuse_ignored,
)


class MonitorFlags:
    """The flags of a program whose training can be watched.

    Args:
        define: Defines them.

    Attributes:
        every: The flags.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._monitor = define.boolean("monitor", False, "Show speed and where the time goes")
        self._json = define.string("monitor_json", None, "File for the reports of --monitor")
        self._trace = define.string("trace", None, "File for a trace of steps 10 to 12, all ranks")
        self._peak = define.string(
            "peak", None, "Most FLOP/s of a rank, or the file of tfdist-bench peak"
        )
        self.every = (self._monitor, self._json, self._trace, self._peak)

    def check(self, *, is_in_step: bool) -> None:
        """Refuses flags that do not go together, and files that are none.

        Args:
            is_in_step: Whether the training runs on ranks in step.
        """
        beside = (self._json, self._trace, self._peak)
        if not self._monitor.value:
            refuse_ignored(self._values, beside, "is for --monitor", "without --monitor")
            return
        if not is_in_step:
            raise UsageError(
                "--monitor is for ranks in step, not for TPUs or parameter servers. Received: --monitor."
            )
        for flag in (self._json, self._trace):
            if flag.value is not None:
                output_file(flag.name, flag.value)
        if self._peak.value is not None and self._number() is None:
            input_file("peak", self._peak.value)

    def _number(self) -> float | None:
        try:
            number = float(self._peak.value)
        except ValueError:
            return None
        return number if math.isfinite(number) and number > 0 else None

    def callbacks(self) -> list[Any]:
        """The Monitor, where it is asked for.

        Raises:
            UsageError: The file of the peak is none.
        """
        if not self._monitor.value:
            return []
        from tfdist.callbacks import Monitor

        peak = None if self._peak.value is None else self._number() or self._peak.value
        try:
            return [Monitor(peak=peak, json=self._json.value, trace=self._trace.value)]
        except ValueError as error:
            raise UsageError(f"--peak={self._peak.value}: {error}") from error
