"""A report of `parallelize` on each variable, as data and as a table."""

from __future__ import annotations

import dataclasses

from tabulate import SEPARATING_LINE, tabulate


@dataclasses.dataclass(frozen=True)
class VariableReport:
    """One variable.

    Attributes:
        path: The variable's path.
        kind: The word of the plan: "column", "row", "vocabulary" or "replicate"; None for a
            variable that no pattern matches, and whose layer is not split either.
        axis: The dim that is split, or None for a variable that stays whole.
        shape: The shape of the global array.
        local_shape: The shape of this rank's part.
        bytes_per_rank: The bytes on one tensor rank, padding included.
        replicated_bytes: The bytes of it that are the same on every tensor rank.
    """

    path: str
    kind: str | None
    axis: int | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes_per_rank: int
    replicated_bytes: int


@dataclasses.dataclass(frozen=True)
class ParallelizeReport:
    """All variables of a model. `print(report)` shows a table.

    Attributes:
        tensor: The number of tensor ranks.
        variables: A row for each variable, in the order of `model.weights`.
    """

    tensor: int
    variables: tuple[VariableReport, ...]

    @property
    def bytes_per_rank(self) -> int:
        """The bytes on one tensor rank."""
        return sum(row.bytes_per_rank for row in self.variables)

    @property
    def replicated_bytes(self) -> int:
        """The bytes of these that are the same on every tensor rank."""
        return sum(row.replicated_bytes for row in self.variables)

    def __str__(self) -> str:
        head = ("variable", "plan", "axis", "shape", "on a rank", "bytes on a rank", "replicated")
        rows = [
            (
                row.path,
                row.kind or "-",
                "-" if row.axis is None else str(row.axis),
                str(row.shape),
                str(row.local_shape),
                f"{row.bytes_per_rank:,}",
                f"{row.replicated_bytes:,}",
            )
            for row in self.variables
        ]
        total = ("total", "", "", "", "", f"{self.bytes_per_rank:,}", f"{self.replicated_bytes:,}")
        sides = ("left",) * 5 + ("right",) * 2
        table = tabulate(
            [*rows, SEPARATING_LINE, total],
            head,
            tablefmt="simple",
            disable_numparse=True,
            colalign=sides,
            headersalign=sides,
        )
        return f"Split over tensor={self.tensor}:\n{table}"
