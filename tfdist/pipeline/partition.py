"""Which links of the chain make up which stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tabulate import tabulate

from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import link_costs
from tfdist.pipeline.link import Link
from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Partition:
    """A chain cut into stages.

    Attributes:
        chain: The chain.
        ends: For each stage, the place after its last link.
        num_ranks: The size of the pipeline axis; stage s lies on rank s % num_ranks.
        costs: What each link costs, in whatever the cut went by.
    """

    chain: Chain
    ends: tuple[int, ...]
    num_ranks: int
    costs: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ends)

    @property
    def chunks(self) -> int:
        """How many stages lie on each rank."""
        return self.num_stages // self.num_ranks

    def links(self, stage: int) -> list[Link]:
        """The links of a stage."""
        begin = self.ends[stage - 1] if stage else 0
        return self.chain.links[begin : self.ends[stage]]

    def share(self, stage: int) -> float:
        """A stage's part of all costs."""
        begin = self.ends[stage - 1] if stage else 0
        return sum(self.costs[begin : self.ends[stage]]) / (sum(self.costs) or 1.0)

    def table(self) -> str:
        """Stage, rank, layers, parameters, FLOPs of a forward of one row, and share of the cost."""
        flops = self.chain.flops() if self.chain.has_known_shapes else None
        head = ("stage", "rank", "layers", "parameters", "FLOPs", "share")
        rows = []
        for stage in range(self.num_stages):
            links = self.links(stage)
            begin = self.ends[stage] - len(links)
            rows.append(
                (
                    str(stage),
                    str(stage % self.num_ranks),
                    links[0].name
                    if len(links) == 1
                    else f"{links[0].name} .. {links[-1].name} ({len(links)})",
                    f"{sum(link.parameters for link in links):,}",
                    "unknown" if flops is None else f"{sum(flops[begin : self.ends[stage]]):,}",
                    f"{self.share(stage):.1%}",
                )
            )
        sides = ("right", "right", "left", "right", "right", "right")
        return tabulate(
            rows, head, tablefmt="plain", disable_numparse=True, colalign=sides, headersalign=sides
        )


def balance(
    costs: Sequence[float], num_stages: int, trained: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Cuts a chain so that the dearest stage is as cheap as can be.

    Args:
        costs: What each link costs.
        num_stages: How many stages, each of at least one link.
        trained: Whether each link has weights to train: as few stages as can be have no such link.
            None: all have some.

    Returns:
        For each stage the place after its last link.

    Raises:
        ValueError: There are fewer links than stages, or a cost is negative.

    Dynamic programming over the chain: the best cut of the first n links into k stages is the
    best, over the length of the last stage, of the cut of what is before it into k - 1.
    """
    links = len(costs)
    if links < num_stages:
        raise ValueError(
            f"A chain of {links} parts cannot be cut into {num_stages} stages: each stage has at "
            "least one. Take fewer pipeline ranks or chunks, or more layers."
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"Costs are not negative. Received: {list(costs)}.")
    sums = [0.0, *itertools.accumulate(costs)]
    lacking = [0, *itertools.accumulate(trained)] if trained is not None else [*range(links + 1)]

    def stage(begin: int, end: int) -> tuple[int, float]:
        return int(lacking[end] == lacking[begin]), sums[end] - sums[begin]

    # best[n] for the number of stages so far: (how many of them have nothing to train, the dearest
    # stage, where the last one begins).
    none = (links, float("inf"), 0)
    best = [(*stage(0, n), 0) if n else none for n in range(links + 1)]
    cuts = [[0] * (links + 1)]
    for number in range(1, num_stages):
        found = [none] * (links + 1)
        for n in range(links + 1):
            for begin in range(number, n):
                untrained, cost = stage(begin, n)
                before = best[begin]
                way = (before[0] + untrained, max(before[1], cost), begin)
                found[n] = min(found[n], way)
        best = found
        cuts.append([way[-1] for way in best])
    ends = [links]
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
    """Cuts a chain into `num_ranks * chunks` stages.

    Args:
        chain: The chain.
        num_ranks: The size of the pipeline axis.
        chunks: How many stages lie on each rank.
        cut: "even": stages of like cost; "cyclic": one link a stage, link l on rank
            l % num_ranks (`chunks` then says how often the chain passes each rank); or the number
            of links of each stage.
        cost: For "even": "flops", "parameters", "seconds" (`measure_seconds`, on this rank alone),
            or a number for each link.

    Raises:
        ValueError: The chain cannot be cut so.
    """
    checks.instance("chain", chain, Chain, "a Chain")
    num_ranks = checks.integer("num_ranks", num_ranks, minimum=1)
    chunks = checks.integer("chunks", chunks, minimum=1)
    stages = num_ranks * chunks
    _check_length(chain, stages)
    costs = link_costs(chain, "cost", cost, ("flops", "parameters", "seconds"))
    if isinstance(cut, str) and cut == "even":
        # Of a model with adapters some parts have nothing to train, as the last, the head.
        trained = [bool(link.trainable_variables) for link in chain.links]
        ends = balance(costs, stages, trained)
    elif isinstance(cut, str) and cut == "cyclic":
        if len(chain) != stages:
            raise ValueError(
                f"cut='cyclic' puts one part of the chain on each stage. Received: {len(chain)} "
                f"parts for {num_ranks} ranks x {chunks} chunks."
            )
        ends = tuple(range(1, stages + 1))
    else:
        meaning = (
            f"'even', 'cyclic', or the number of parts of each of the {stages} stages, "
            f"{len(chain)} in all"
        )
        try:
            lengths = checks.integers("cut", cut, minimum=1)
        except ValueError:
            raise checks.refuse("cut", cut, meaning) from None
        if len(lengths) != stages or sum(lengths) != len(chain):
            raise checks.refuse("cut", cut, meaning)
        ends = tuple(itertools.accumulate(lengths))
    return Partition(chain, ends, num_ranks, costs)


def _check_length(chain: Chain, stages: int) -> None:
    """Refuses more stages than there are links.

    Raises:
        ValueError: There are too few; it says why the longest link is whole.
    """
    if len(chain) >= stages:
        return
    why = ""
    whole = [link for link in chain.links if link.why_whole]
    if whole:
        longest = max(whole, key=lambda link: len(link.layers))
        name = longest.name if len(longest.name) < 60 else f"{longest.name[:57]}..."
        why = (
            f"`{name}` is one part, since {longest.why_whole}; a layer made of layers is one too. "
        )
    raise ValueError(
        f"A chain of {len(chain)} parts cannot be cut into {stages} stages: each stage has at least "
        f"one. {why}Take fewer pipeline ranks or chunks, or more layers of which one tensor leads to "
        "the next."
    )
