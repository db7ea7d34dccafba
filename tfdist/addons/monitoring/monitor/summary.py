"""The contents of a report: the figures of all ranks together, over some steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.addons.monitoring.monitor.block import MOST_TIMERS, Block
from tfdist.addons.monitoring.monitor.sections import SECTIONS
from tfdist.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of some steps, those of all ranks together.

    Attributes:
        kind: "interval" or "epoch".
        step: The number of steps of this `fit` so far.
        epoch: The epoch, from 0.
        batch: The number of batches of the epoch so far.
        logs: The figures by name; see docs/monitoring.md.
        sections: The fraction of a step by section, averaged over ranks; they add up to 1.
        ranks: For each rank `work` (seconds of a step in which it does not wait for others), `score`, the
            fraction of steps in which it `came_last`, and its `sections` in seconds.
    """

    kind: str
    step: int
    epoch: int
    batch: int
    logs: dict[str, float]
    sections: dict[str, float]
    ranks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object, without numbers that are not finite."""
        found = dataclasses.asdict(self)
        found["logs"] = {k: v for k, v in self.logs.items() if math.isfinite(v)}
        return found


class Totals:
    """Adds up blocks of all ranks until a report is due.

    Args:
        mesh: The mesh; None for one process without one.
        peak_flops: The peak floating-point operations per second of a rank; None where that is not
            known.
        bandwidth: The peak bytes per second that a rank sends; None where that is not known.
    """

    def __init__(self, mesh: Mesh | None, peak_flops: float | None, bandwidth: float | None):
        self._mesh, self._peak, self._bandwidth = mesh, peak_flops, bandwidth
        self._blocks: list[list[Block]] = []

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(sum(blocks[0]["steps"] for blocks in self._blocks))

    def add(self, blocks: Sequence[Block]) -> None:
        """Adds a block of each rank."""
        self._blocks.append(list(blocks))

    def clear(self) -> None:
        """Removes all blocks."""
        self._blocks = []

    def _sum(self, name: str, rank: int | None = None) -> float:
        ranks = range(len(self._blocks[0])) if rank is None else (rank,)
        return sum(blocks[each][name] for blocks in self._blocks for each in ranks)

    def _ranks_of(self, axes: Sequence[str]) -> int:
        return 1 if self._mesh is None else math.prod(self._mesh.shape[axis] for axis in axes)

    def logs(self) -> dict[str, float]:
        """The figures, by name."""
        size = len(self._blocks[0])
        steps, seconds = self._sum("steps"), self._sum("seconds")
        if not steps or seconds <= 0:
            return {}
        mean = seconds / steps
        spread = math.sqrt(max(self._sum("squares") / steps - mean * mean, 0.0))
        # A step lasts equally long on all ranks: the time that passed is that of one of them.
        passed = seconds / size
        rows = 1 if self._mesh is None else self._ranks_of(self._mesh.row_axes)
        tokens = rows if self._mesh is None else rows * self._ranks_of(self._mesh.token_axes)
        found = {
            "step_seconds": mean,
            "step_seconds_std": spread,
            "step_seconds_max": max(b[r]["longest"] for b in self._blocks for r in range(size)),
            "samples_per_second": self._sum("rows") * rows / size / passed,
        }
        if self._sum("tokens"):
            found["tokens_per_second"] = self._sum("tokens") * tokens / size / passed
        flops = self._sum("model_flops")
        if flops:
            found["model_flops_per_second"] = flops / passed
            if self._peak:
                found["mfu"] = flops / (seconds * self._peak)
                found["hfu"] = (flops + self._sum("again_flops")) / (seconds * self._peak)
        communicating, hidden = self._sum("communicating"), self._sum("hidden")
        if communicating:
            found["communication_hidden"] = hidden / communicating
            found["bytes_per_second"] = self._sum("sent") / communicating
            if self._bandwidth:
                found["bandwidth_use"] = found["bytes_per_second"] / self._bandwidth
        found["compute_share"] = (
            self._sum("total/forward_backward") + self._sum("total/optimizer")
        ) / seconds
        last = self._blocks[-1]
        found["memory"] = max(block["memory"] for block in last)
        found["peak_memory"] = max(block["peak_memory"] for block in last)
        if found["peak_memory"]:
            most = max(last, key=lambda block: block["peak_memory"])
            found["memory_efficiency"] = most["parameters"] / most["peak_memory"]
        norms = [sum(block["norm"] for block in blocks) for blocks in self._blocks]
        norm = next((each for each in reversed(norms) if each), 0.0)
        if norm:
            found["gradient_norm"] = math.sqrt(norm)
        if self._sum("losses"):
            found["loss"] = self._sum("loss") / self._sum("losses")
        if last[0]["loss_scale"]:
            found["loss_scale"] = last[0]["loss_scale"]
        if size > 1:
            work = [self._mean_work(rank) for rank in range(size)]
            found["imbalance"] = (max(work) - min(work)) / (sum(work) / size)
        return found

    def _mean_work(self, rank: int) -> float:
        counted = [blocks[rank] for blocks in self._blocks if blocks[rank]["steps"]]
        weight = sum(block["steps"] for block in counted)
        return sum(block["work"] * block["steps"] for block in counted) / weight

    def sections(self, timers: Sequence[str], rank: int | None = None) -> dict[str, float]:
        """The fraction of a step by section, of one rank or of all."""
        seconds = self._sum("seconds", rank)
        if not seconds:
            return {}
        found = {name: self._sum(f"total/{name}", rank) / seconds for name in SECTIONS}
        for place, name in enumerate(timers[:MOST_TIMERS]):
            found[name] = self._sum(f"total/timer/{place}", rank) / seconds
        return found

    def ranks(self, timers: Sequence[str], scores: Mapping[int, dict]) -> list[dict[str, Any]]:
        """The work, sections and scores of each rank."""
        found = []
        for rank in range(len(self._blocks[0])):
            steps = max(self._sum("steps", rank), 1)
            seconds = self._sum("seconds", rank) / steps
            shares = self.sections(timers, rank)
            found.append(
                {
                    "work": self._mean_work(rank) if self._sum("steps", rank) else 0.0,
                    "sections": {name: share * seconds for name, share in shares.items()},
                    "hidden": self._sum("hidden", rank) / steps,
                    **scores.get(rank, {}),
                }
            )
        return found
