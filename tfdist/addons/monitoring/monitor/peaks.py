"""The peak performance of a rank, as `tfdist-bench peak` measures it for a `Monitor`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak performance of a rank.

    Attributes:
        flops: Floating-point operations per second, in products of large matrices.
        bytes_per_second: The bytes that a rank sends per second, in a sum of large arrays over all
            ranks; None where that was not measured.
    """

    flops: float
    bytes_per_second: float | None = None

    def write(self, path: str, **more: Any) -> None:
        """Writes the peak as JSON.

        Args:
            path: The file.
            **more: Additional entries, such as a description of the machine.

        Raises:
            OSError: It cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self) | more, file, indent=1)
            file.write("\n")


def checked_peak(name: str, value: Any) -> Peak | None:
    """A peak from a number of FLOP/s, or from a file of `tfdist-bench peak`.

    Raises:
        ValueError: The value is neither.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        return Peak(checks.number(name, value, above=0))
    path = checks.path(name, value)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        peak = Peak(found["flops"], found.get("bytes_per_second"))
        sizes = (peak.flops, 1.0 if peak.bytes_per_second is None else peak.bytes_per_second)
        if not all(type(s) in (int, float) and math.isfinite(s) and s > 0 for s in sizes):
            raise ValueError(f"expected positive numbers, received {checks.shown(found)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise checks.refuse(
            name,
            value,
            f"a number of FLOP/s, or a file that `tfdist-bench peak --output=FILE` wrote ({error})",
        ) from error
    return peak
