"""The groups of ranks that a program on a mesh may use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tfdist.mesh import Mesh


def rank_sets(mesh: Mesh, pairs_along: Iterable[str] = ()) -> list[tuple[int, ...]]:
    """All groups of two or more ranks except the world, in an order that is the same on all ranks.

    Args:
        mesh: The mesh, resolved.
        pairs_along: Axes along which any two ranks are a group.
    """
    found: dict[tuple[int, ...], None] = {}
    spread = [axis for axis, degree in mesh.shape.items() if degree > 1]
    for count in range(1, len(spread)):
        for axes in itertools.combinations(spread, count):
            found.update(dict.fromkeys(mesh.groups(*axes)))
    for axis in pairs_along:
        for ranks in mesh.groups(axis):
            found.update(dict.fromkeys(itertools.combinations(ranks, 2)))
    return [ranks for ranks in found if 1 < len(ranks) < mesh.size]
