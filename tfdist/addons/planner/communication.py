"""Cost models of collectives: seconds from bytes, ranks and links.

With n ranks, S bytes, a latency of a seconds and B bytes per second. Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", sections 3 and 4, unless noted otherwise.
"""

from __future__ import annotations

import dataclasses
import math

from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import Link, Machine


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """The links of a group of ranks.

    Attributes:
        ranks: Size of the group.
        members: Members of the group on one host.
        inside: The link between members on a host.
        between: The group's share of the link between hosts; None on one host.
        slowest: The link that limits a ring over all members.
    """

    ranks: int
    members: int
    inside: Link
    between: Link | None
    slowest: Link


def way(layout: Layout, axes: tuple[str, ...], machine: Machine) -> Way:
    """The links of a group over some axes of a layout.

    The groups of a host share its ports: a group with m of a host's r ranks has m / r of the
    bandwidth of all ports, limited to that of one port without `rails`.

    Raises:
        ValueError: The ranks are on several hosts, and the machine has no link between hosts.
    """
    ranks = math.prod(getattr(layout, axis) for axis in axes)
    on_host = min(machine.ranks_per_host, layout.ranks)
    members = min(layout.members_per_host(axes, on_host), ranks)
    if members >= ranks:
        return Way(ranks, ranks, machine.inside, None, machine.inside)
    if machine.between is None:
        raise ValueError(
            f"{machine.name} must have a link `between` hosts for ranks on several hosts. Received: "
            f"between=None, {layout.ranks} ranks, {machine.ranks_per_host} per host."
        )
    one = machine.between.bandwidth
    share = machine.host_ports * one * members / on_host
    rate = share if machine.rails else min(one, share)
    between = Link(machine.between.latency, min(rate, machine.inside.bandwidth * members))
    slowest = Link(between.latency, min(between.bandwidth, machine.inside.bandwidth))
    return Way(ranks, members, machine.inside, between, slowest)


def ring_all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds of a ring all-reduce: 2 (n - 1) a + 2 (n - 1) / n S / B (Patarasuk and Yuan 2009)."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree_all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce over two binary trees: 2 log2(n) a + 2 S / B.

    Sanders, Speck and Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan"; each tree moves half of the bytes up and down, in pipelined pieces.
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * size / link.bandwidth


def two_level_all_reduce(size: float, group: Way) -> float:
    """Seconds of a reduce-scatter within hosts, an all-reduce between them, and an all-gather.

    Each of a host's m members sends S / m bytes to other hosts; together they share `between`.
    """
    if group.between is None:
        return ring_all_reduce(size, group.ranks, group.inside)
    hosts = -(-group.ranks // group.members)
    inner = 2 * (group.members - 1) * (
        group.inside.latency + size / group.members / group.inside.bandwidth
    )  # fmt: skip
    return inner + ring_all_reduce(size, hosts, group.between)


def all_reduce(size: float, group: Way, algorithm: str = "best") -> float:
    """Seconds of an all-reduce of S bytes, by one algorithm or the fastest of three."""
    found = {
        "ring": ring_all_reduce(size, group.ranks, group.slowest),
        "tree": tree_all_reduce(size, group.ranks, group.slowest),
        "two-level": two_level_all_reduce(size, group),
    }
    return min(found.values()) if algorithm == "best" else found[algorithm]


def all_gather(size: float, group: Way) -> float:
    """Seconds of an all-gather or reduce-scatter of S bytes in total: (n - 1) (a + S / n / B)."""
    ranks = group.ranks
    if ranks == 1:
        return 0.0
    ring = (ranks - 1) * (group.slowest.latency + size / ranks / group.slowest.bandwidth)
    if group.between is None:
        return ring
    hosts, m = -(-ranks // group.members), group.members
    levels = (hosts - 1) * (group.between.latency + size / hosts / group.between.bandwidth) + (
        m - 1
    ) * (group.inside.latency + size / m / group.inside.bandwidth)
    return min(ring, levels)


def all_to_all(size: float, group: Way) -> float:
    """Seconds of an all-to-all in which each rank sends S bytes in total: a + (n - 1) / n S / B.

    Messages to all ranks are sent concurrently, so that the latency counts once. Messages to other
    hosts use the host's ports, which the group's m members on the host share.
    """
    ranks = group.ranks
    if ranks == 1:
        return 0.0
    near = (group.members - 1) / ranks * size / group.inside.bandwidth
    if group.between is None:
        return group.inside.latency + near
    far = (ranks - group.members) / ranks * size
    seconds = far * group.members / group.between.bandwidth
    return group.between.latency + near + seconds


def send(size: float, link: Link) -> float:
    """Seconds of a message from one rank to another: a + S / B."""
    return link.latency + size / link.bandwidth
