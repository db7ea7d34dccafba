"""The communication between hosts: few bytes over the links between them, more inside each host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A rank's partners in a sum that is computed inside hosts first, and then across.

    With k ranks on each of h hosts a rank sums a k-th of the whole for its host, and exchanges only that
    k-th across hosts: 2 (h - 1) / h of the whole is sent over a host's link in each direction, and k times
    as much in a flat exchange.

    Attributes:
        local: The members on this rank's host, in the order of the group.
        across: The members with the same index on each host.
    """

    local: tuple[int, ...]
    across: tuple[int, ...]


def hierarchy_of(ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]) -> Hierarchy | None:
    """The hierarchy of a group over hosts.

    Args:
        ranks: The group's members, in order.
        rank: One of them.
        hosts: The host of each rank of the world.

    Returns:
        Its partners; None if a hierarchy saves nothing or is impossible: all members are on one host, or
        hosts have one member each, or different numbers.
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
