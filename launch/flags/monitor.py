"""The flags of monitoring."""

from __future__ import annotations

import math
from typing import Any

from tfdist.launch.flags.values import (
    FlagDefiner,
    UsageError,
    input_file,
    output_file,
    refuse_ignored,
)


class MonitorFlags:
    """The flags of monitoring a training run.

    Args:
        define: The definer of the program's flags.

    Attributes:
        every: All of the flags.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._monitor = define.boolean("monitor", False, "Show speed and where the time goes")
        self._json = define.string("monitor_json", None, "File for the reports of --monitor")
        self._trace = define.string("trace", None, "File for a trace of steps 10 to 12, all ranks")
        self._peak = define.string(
            "peak", None, "Peak FLOP/s of a rank, or a file of tfdist-bench peak"
        )
        self.every = (self._monitor, self._json, self._trace, self._peak)

    def check(self, *, is_in_step: bool) -> None:
        """Reject incompatible flags and invalid files.

        Args:
            is_in_step: Whether the training is synchronous, on ranks.
        """
        beside = (self._json, self._trace, self._peak)
        if not self._monitor.value:
            refuse_ignored(self._values, beside, "requires --monitor", "without --monitor")
            return
        if not is_in_step:
            raise UsageError(
                "--monitor is not supported on a TPU or with parameter servers. Received: --monitor."
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
        """The Monitor, if requested.

        Raises:
            UsageError: The file of --peak is not valid.
        """
        if not self._monitor.value:
            return []
        from tfdist.callbacks import Monitor

        peak = None if self._peak.value is None else self._number() or self._peak.value
        try:
            return [Monitor(peak=peak, json=self._json.value, trace=self._trace.value)]
        except ValueError as error:
            raise UsageError(f"--peak={self._peak.value} is not valid: {error}") from error
