"""What a job asks of its links, beside what they give, and what helps where that is not enough."""

from __future__ import annotations

import dataclasses
import math

from tabulate import tabulate

from tfdist.addons.planner.communication import way
from tfdist.addons.planner.estimates import Estimate
from tfdist.addons.planner.goodput import required_bandwidth
from tfdist.addons.planner.machines import Link, Machine
from tfdist.addons.planner.memory import BUCKET_BYTES
from tfdist.utils import checks
from tfdist.utils.quantities import as_seconds

#: Of a step, what the latency of its messages may take.
LATENCY_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What gradients ask of the slowest link that they take.

    Attributes:
        bandwidth: Bytes a second and rank, in one direction, for all gradients to be summed in the time of a
            step's arithmetic.
        given_bandwidth: What the link has.
        latency: The most seconds of a hop.
        given_latency: What the link has.
        accumulation: Steps whose gradients would have to be added up for the bandwidth to do. None under
            ZeRO-2 and 3, which reduce those of each step.
        compression: By how much gradients would have to shrink for it; 1.0 if it does.
    """

    bandwidth: float
    given_bandwidth: float
    latency: float
    given_latency: float
    accumulation: int | None
    compression: float

    @property
    def is_met(self) -> bool:
        """Whether the link does."""
        return self.bandwidth <= self.given_bandwidth and self.given_latency <= self.latency

    @property
    def remedy(self) -> str:
        """What helps where it does not, in words; "" where it does."""
        found = []
        if self.bandwidth > self.given_bandwidth:
            steps = ""
            if self.accumulation is not None:
                steps = f"accumulate {self.accumulation} steps (--accumulate), "
            found.append(
                f"the bandwidth falls short: {steps}compress gradients {self.compression:.2g}-fold "
                "(--compression), or train apart (--sync_every)"
            )
        if self.given_latency > self.latency:
            found.append(
                "the latency is too large: larger buckets (bucket_mib), fewer ranks on the data axis, or more "
                "rows a rank"
            )
        return "; ".join(found)


def largest_latency(step_seconds: float, messages: int, share: float = LATENCY_SHARE) -> float:
    """The most seconds that one hop may take for the hops of a step to take a share of it.

    Args:
        step_seconds: Seconds of a step.
        messages: Hops of a step that follow each other.
        share: Of the step, what they may take.
    """
    checks.number("step_seconds", step_seconds, above=0)
    checks.integer("messages", messages, minimum=1, maximum=2**62)
    checks.number("share", share, above=0, maximum=1)
    return share * step_seconds / messages


def requirement(estimate: Estimate, machine: Machine) -> Requirement | None:
    """What the gradients of a layout ask of the machine's links; None where no rank sends any.

    A ring over n ranks sends 2 (n - 1) / n of the gradients' bytes each update, in 2 (n - 1) hops a
    bucket (Patarasuk and Yuan 2009).

    Args:
        estimate: Of a step of the layout.
        machine: The machine.

    Raises:
        ValueError: The ranks lie on several hosts, and the machine has no link between these.
    """
    checks.instance("estimate", estimate, Estimate, "an Estimate")
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    layout = estimate.layout
    ranks = layout.data * layout.context * layout.expert
    if ranks == 1:
        return None
    link = way(layout, ("context", "expert", "data"), machine).slowest
    # Of the bytes that the layout sends, those of one sum: ZeRO-3 sends one and a half, in micro-steps more.
    share = 2 * (ranks - 1) / ranks
    sums = 1.5 if layout.zero_stage == 3 and layout.pipeline == 1 else 1.0
    passes = layout.accumulation if layout.zero_stage >= 2 else 1
    size = estimate.traffic["data"] / share / sums / passes
    if not size:
        return None
    seconds = estimate.seconds
    busy = seconds["compute"] + seconds["bubble"] + seconds["optimizer"] + seconds["other"]
    buckets = max(math.ceil(size / BUCKET_BYTES), 1) * passes
    asked = asked_of_link(size * sums * passes, buckets, ranks, link, busy, estimate.step_seconds)
    return dataclasses.replace(
        asked,
        accumulation=math.ceil(layout.accumulation * asked.compression)
        if layout.zero_stage < 2
        else None,
        compression=layout.compression * asked.compression,
    )


def asked_of_link(
    size: float, buckets: int, ranks: int, link: Link, busy_seconds: float, step_seconds: float
) -> Requirement:
    """What gradients that are neither accumulated nor compressed ask of a link.

    Args:
        size: Bytes that are summed in a step.
        buckets: In how many messages.
        ranks: Ranks that add up, two at least.
        link: The link.
        busy_seconds: Seconds of a step's arithmetic.
        step_seconds: Seconds of a step.
    """
    needed = required_bandwidth(size, 1 / busy_seconds, ranks)
    falls_short = max(needed / link.bandwidth, 1.0)
    return Requirement(
        bandwidth=needed,
        given_bandwidth=link.bandwidth,
        latency=largest_latency(step_seconds, 2 * (ranks - 1) * buckets),
        given_latency=link.latency,
        accumulation=math.ceil(falls_short),
        compression=falls_short,
    )


def table(found: Requirement) -> str:
    """A requirement as text."""
    rows = [
        ("bandwidth of a rank", _rate(found.bandwidth), _rate(found.given_bandwidth)),
        ("latency of a hop", as_seconds(found.latency), as_seconds(found.given_latency)),
    ]
    head = ("gradients ask of the link", "at least, at most", "it has")
    lines = [tabulate(rows, head, disable_numparse=True, colalign=("left", "right", "right"))]
    return "\n".join([*lines, found.remedy] if found.remedy else lines)


def _rate(value: float) -> str:
    """Bytes a second in bits, as links are sold."""
    return f"{8 * value / 1e9:,.3g} Gbit/s"
