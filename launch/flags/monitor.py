"""The options of monitoring."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfdist.launch.flags.options import option, refuse_ignored
from tfdist.launch.flags.values import UsageError, input_file, output_file


@dataclasses.dataclass(frozen=True)
class MonitorOptions:
    """The options of monitoring a training run; see the flags of the same names."""

    monitor: bool = option(False, "Show speed and where the time goes")
    monitor_json: str | None = option(None, "File for the reports of --monitor")
    trace: str | None = option(None, "File for a trace of steps 10 to 12, all ranks")
    peak: str | None = option(None, "Peak FLOP/s of a rank, or a file of tfdist-bench peak")

    def check(self, *, is_in_step: bool) -> None:
        """Reject incompatible options and invalid files.

        Args:
            is_in_step: Whether the training is synchronous, on ranks.
        """
        if not self.monitor:
            beside = ("monitor_json", "trace", "peak")
            refuse_ignored(self, beside, "requires --monitor", "without --monitor")
            return
        if not is_in_step:
            raise UsageError(
                "--monitor is not supported on a TPU or with parameter servers. Received: --monitor."
            )
        for name, file in (("monitor_json", self.monitor_json), ("trace", self.trace)):
            if file is not None:
                output_file(name, file)
        if self.peak is not None and self._number() is None:
            input_file("peak", self.peak)

    def _number(self) -> float | None:
        try:
            number = float(self.peak or "")
        except ValueError:
            return None
        return number if math.isfinite(number) and number > 0 else None

    def callbacks(self) -> list[Any]:
        """The Monitor, if requested.

        Raises:
            UsageError: The file of --peak is not valid.
        """
        if not self.monitor:
            return []
        from tfdist.callbacks import Monitor

        try:
            peak = self._number() or self.peak
            return [Monitor(peak=peak, json=self.monitor_json, trace=self.trace)]
        except ValueError as error:
            raise UsageError(f"--peak={self.peak} is not valid: {error}") from error
