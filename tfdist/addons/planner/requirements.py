"""The bandwidth and latency that a job requires of its links, and remedies for slow links."""

from __future__ import annotations

import dataclasses
import math

from tabulate import tabulate

from tfdist.addons.planner.communication import way
from tfdist.addons.planner.estimates import Estimate
from tfdist.addons.planner.goodput import required_bandwidth
from tfdist.addons.planner.machines import Link, Machine
from tfdist.addons.planner.quantities import as_seconds
from tfdist.utils import checks

#: The share of a step that the latency of its messages may cost.
LATENCY_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Requirement:
    """The link that the communication of gradients requires.

    Attributes:
        bandwidth: Bytes per second and rank, in one direction, to sum all gradients in the time of a
            step's arithmetic.
        given_bandwidth: Bandwidth of the slowest link, in bytes per second.
        latency: The largest acceptable latency of a hop, in seconds.
        given_latency: Latency of the slowest link, in seconds.
        accumulation: Steps of accumulation for which the bandwidth suffices. None under ZeRO-2 and 3,
            which reduce the gradients of each step.
        compression: Compression ratio for which the bandwidth suffices.
    """

    bandwidth: float
    given_bandwidth: float
    latency: float
    given_latency: float
    accumulation: int | None
    compression: float

    @property
    def is_met(self) -> bool:
        """Whether the link suffices."""
        return self.bandwidth <= self.given_bandwidth and self.given_latency <= self.latency

    @property
    def remedy(self) -> str:
        """Remedies for an insufficient link, as text; "" if it suffices."""
        found = []
        if self.bandwidth > self.given_bandwidth:
            steps = ""
            if self.accumulation is not None:
                steps = f"accumulate {self.accumulation} steps (--accumulate), "
            found.append(
                f"the bandwidth is too low: {steps}compress gradients {self.compression:.2g}-fold "
                "(--compression), or use local steps (--sync_every)"
            )
        if self.given_latency > self.latency:
            found.append(
                "the latency is too high: use larger buckets (bucket_mib), fewer ranks on the data axis, or "
                "more rows per rank"
            )
        return "; ".join(found)


def largest_latency(step_seconds: float, messages: int, share: float = LATENCY_SHARE) -> float:
    """The largest latency of a hop, in seconds, so that a step's hops cost at most a share of it.

    Args:
        step_seconds: Seconds of a step.
        messages: Number of sequential hops of a step.
        share: The share of the step.
    """
    checks.number("step_seconds", step_seconds, above=0)
    checks.integer("messages", messages, minimum=1, maximum=2**62)
    checks.number("share", share, above=0, maximum=1)
    return share * step_seconds / messages


def requirement(estimate: Estimate, machine: Machine) -> Requirement | None:
    """The link that the gradients of a layout require; None if no rank sends gradients.

    A ring over n ranks sends 2 (n - 1) / n of the gradients' bytes per update, in 2 (n - 1) hops per
    bucket (Patarasuk and Yuan 2009).

    Args:
        estimate: The estimate of a step of the layout.
        machine: The machine.

    Raises:
        ValueError: The ranks are on several hosts, and the machine has no link between hosts.
    """
    checks.instance("estimate", estimate, Estimate, "an Estimate")
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    layout = estimate.layout
    ranks = layout.data * layout.context * layout.expert
    if ranks == 1:
        return None
    link = way(layout, ("context", "expert", "data"), machine).slowest
    # The bytes of one sum: ZeRO-3 sends one and a half times those, ZeRO-2 and 3 in each micro-step.
    share = 2 * (ranks - 1) / ranks
    sums = 1.5 if layout.zero_stage == 3 and layout.pipeline == 1 else 1.0
    passes = layout.accumulation if layout.zero_stage >= 2 else 1
    size = estimate.traffic["data"] / share / sums / passes
    if not size:
        return None
    seconds = estimate.seconds
    busy = seconds["compute"] + seconds["bubble"] + seconds["optimizer"] + seconds["other"]
    buckets = max(math.ceil(size / machine.bucket_bytes), 1) * passes
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
    """The link that gradients require without accumulation and compression.

    Args:
        size: Bytes that are summed in a step.
        buckets: Number of buckets.
        ranks: Ranks of the all-reduce, at least two.
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
        ("bandwidth per rank, at least", _rate(found.bandwidth), _rate(found.given_bandwidth)),
        ("latency per hop, at most", as_seconds(found.latency), as_seconds(found.given_latency)),
    ]
    head = ("link for gradients", "required", "available")
    lines = [tabulate(rows, head, disable_numparse=True, colalign=("left", "right", "right"))]
    return "\n".join([*lines, found.remedy] if found.remedy else lines)


def _rate(value: float) -> str:
    """A bandwidth in bytes per second as text in Gbit/s."""
    return f"{8 * value / 1e9:,.3g} Gbit/s"
