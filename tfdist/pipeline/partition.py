"""The segments of each stage of a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence

from tabulate import tabulate

from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import segment_costs
from tfdist.pipeline.segment import Segment
from tfdist.utils import checks

_MAX_NAME = 60


@dataclasses.dataclass(frozen=True)
class Partition:
    """A chain split into stages.

    Attributes:
        chain: The chain.
        ends: The end of each stage: the index after its last segment.
        num_ranks: The size of the pipeline axis; stage s is on rank s % num_ranks.
        costs: The cost of each segment.
    """

    chain: Chain
    ends: tuple[int, ...]
    num_ranks: int
    costs: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ends)

    def _of(self, stage: int) -> slice:
        return slice(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def segments(self, stage: int) -> list[Segment]:
        """The segments of a stage."""
        return self.chain.segments[self._of(stage)]

    def segments_of_rank(self, rank: int) -> list[Segment]:
        """The segments of all stages on a rank."""
        stages = range(rank, self.num_stages, self.num_ranks)
        return [segment for stage in stages for segment in self.segments(stage)]

    def check_trained(self, with_gradient: Container[int] | None = None) -> None:
        """Raises ValueError if a rank has no weights to train, which optimizers do not support.

        Args:
            with_gradient: The ids of the variables with a gradient, if they are known.
        """
        for rank in range(self.num_ranks):
            segments = self.segments_of_rank(rank)
            trained = [v for segment in segments for v in segment.trainable_variables]
            if not any(with_gradient is None or id(v) in with_gradient for v in trained):
                raise ValueError(
                    "Each rank of a pipeline requires trainable weights that a loss depends on. Received: "
                    f"none on rank {rank} in {', '.join(segment.name for segment in segments)}. Split the "
                    "chain elsewhere by `cut`."
                )

    def table(self) -> str:
        """Stage, rank, layers, parameters, FLOPs of a forward pass of one row, and share of the cost."""
        flops = self.chain.flops() if self.chain.has_known_shapes else None
        total = sum(self.costs) or 1.0
        rows = []
        for stage in range(self.num_stages):
            segments = self.segments(stage)
            first, last = segments[0].name, segments[-1].name
            rows.append(
                (
                    str(stage),
                    str(stage % self.num_ranks),
                    first if len(segments) == 1 else f"{first} .. {last} ({len(segments)})",
                    f"{sum(segment.parameters for segment in segments):,}",
                    "unknown" if flops is None else f"{sum(flops[self._of(stage)]):,}",
                    f"{sum(self.costs[self._of(stage)]) / total:.1%}",
                )
            )
        head = ("stage", "rank", "layers", "parameters", "FLOPs", "share")
        sides = ("right", "right", "left", "right", "right", "right")
        return tabulate(
            rows, head, tablefmt="plain", disable_numparse=True, colalign=sides, headersalign=sides
        )


def balance(
    costs: Sequence[float], num_stages: int, trained: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Splits a chain so that the cost of the most expensive stage is minimal.

    Dynamic programming over the chain: the best split of the first n segments into k stages minimizes,
    over the beginning of the last stage, the split of the segments before it into k - 1 stages.

    Args:
        costs: The cost of each segment, not negative.
        num_stages: The number of stages, at most that of segments.
        trained: Whether each segment has trainable weights: the number of stages without any is
            minimized first. None if all have some.

    Returns:
        The end of each stage: the index after its last segment.
    """
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    lacking = [*range(count + 1)] if trained is None else [0, *itertools.accumulate(trained)]
    # For each n: the number of stages without trainable weights, the cost of the most expensive stage,
    # and the beginning of the last stage.
    none = (count, float("inf"), 0)
    best = [(0, 0.0, 0)] + [none] * count
    cuts = []
    for number in range(num_stages):
        found = [none] * (count + 1)
        for n in range(number + 1, count + 1):
            for begin in range(number, n if number else 1):
                untrained, most, _ = best[begin]
                untrained += lacking[n] == lacking[begin]
                found[n] = min(found[n], (untrained, max(most, sums[n] - sums[begin]), begin))
        best = found
        cuts.append([way[-1] for way in best])
    ends = [count]
    for begins in reversed(cuts[1:]):
        ends.append(begins[ends[-1]])
    return tuple(reversed(ends))


def make_partition(
    chain: Chain,
    num_ranks: int,
    chunks: int = 1,
    *,
    cut: str | Sequence[int] = "even",
    cost: str | Sequence[float] = "flops",
) -> Partition:
    """Splits a chain into `num_ranks * chunks` stages.

    Args:
        chain: The chain.
        num_ranks: The size of the pipeline axis.
        chunks: The number of stages on each rank.
        cut: "even" for stages of similar cost; "cyclic" for one segment per stage, with segment i on rank
            i % num_ranks (`chunks` is then the number of segments on each rank); or the number of segments
            of each stage.
        cost: For "even": "flops", "parameters", "seconds" (`measure_seconds`, on this rank alone),
            or a number for each segment.

    Raises:
        ValueError: The chain cannot be split as requested.
    """
    checks.instance("chain", chain, Chain, "a Chain")
    num_ranks = checks.integer("num_ranks", num_ranks, minimum=1)
    chunks = checks.integer("chunks", chunks, minimum=1)
    stages = num_ranks * chunks
    _check_length(chain, stages)
    costs = segment_costs(chain, "cost", cost, ("flops", "parameters", "seconds"))
    if isinstance(cut, str) and cut == "even":
        # Parts of a model with adapters may have no trainable weights, such as its head.
        trained = [bool(segment.trainable_variables) for segment in chain.segments]
        return Partition(chain, balance(costs, stages, trained), num_ranks, costs)
    if isinstance(cut, str) and cut == "cyclic":
        if len(chain) != stages:
            raise ValueError(
                "cut='cyclic' requires one part of the chain for each stage. Received: "
                f"{len(chain)} parts for {num_ranks} ranks x {chunks} chunks."
            )
        lengths = (1,) * stages
    else:
        try:
            lengths = checks.integers("cut", cut, minimum=1)
        except ValueError:
            lengths = ()
        if len(lengths) != stages or sum(lengths) != len(chain):
            meaning = (
                f"'even', 'cyclic', or the number of parts of each of the {stages} stages, "
                f"{len(chain)} in all"
            )
            raise checks.refuse("cut", cut, meaning)
    return Partition(chain, tuple(itertools.accumulate(lengths)), num_ranks, costs)


def _check_length(chain: Chain, stages: int) -> None:
    """Raises ValueError if there are fewer segments than stages, with a reason for the largest one."""
    if len(chain) >= stages:
        return
    why = ""
    whole = [segment for segment in chain.segments if segment.why_whole]
    if whole:
        longest = max(whole, key=lambda segment: len(segment.layers))
        name = longest.name
        name = name if len(name) < _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."
        why = (
            f"`{name}` cannot be split, since {longest.why_whole}; nor can a layer made of layers. "
        )
    raise ValueError(
        f"A chain of {len(chain)} parts cannot be split into {stages} stages: each stage requires at "
        f"least one. {why}Use fewer pipeline ranks or chunks, or more layers between which a single "
        "tensor is passed."
    )
