"""Which ranks talk across hosts: few bytes over the links between them, more inside of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A rank's partners in a sum that is taken inside of hosts, and then across.

    With k ranks on each of h hosts a rank adds up a k-th of the whole for its host, and what it
    gets across is that k-th alone: a host's link carries 2 (h - 1) / h of the whole each way, where
    the shares of a flat exchange would carry k times that.

    Attributes:
        local: The members on this rank's host, in the order of the group.
        across: The members that have its place there on each host.
    """

    local: tuple[int, ...]
    across: tuple[int, ...]


def hierarchy_of(ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]) -> Hierarchy | None:
    """How a group sums up over hosts.

    Args:
        ranks: The group's members, in order.
        rank: One of them.
        hosts: The host of each rank of the world.

    Returns:
        Its partners; None where that saves nothing, or cannot be: all are on one host, or hosts
        have one each, or not equally many.
    """
    places: dict[Hashable, list[int]] = {}
    for member in ranks:
        places.setdefault(hosts[member], []).append(member)
    counts = {len(members) for members in places.values()}
    if len(places) == 1 or len(counts) > 1 or counts == {1}:
        return None
    local = places[hosts[rank]]
    place = local.index(rank)
    return Hierarchy(tuple(local), tuple(members[place] for members in places.values()))
