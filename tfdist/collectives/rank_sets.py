"""The groups of ranks that a program on a mesh may use."""

from __future__ import annotations

import itertools

from tfdist.mesh import Mesh


def rank_sets(mesh: Mesh) -> list[tuple[int, ...]]:
    """All groups of two or more ranks except the world, in an order that is the same on all ranks.

    These are the groups along any axes of the resolved mesh, and any two ranks along its `message_axes`.
    """
    found: dict[tuple[int, ...], None] = {}
    spread = [axis for axis, degree in mesh.shape.items() if degree > 1]
    for count in range(1, len(spread)):
        for axes in itertools.combinations(spread, count):
            found.update(dict.fromkeys(mesh.groups(*axes)))
    for axis in mesh.message_axes:
        for ranks in mesh.groups(axis):
            found.update(dict.fromkeys(itertools.combinations(ranks, 2)))
    return [ranks for ranks in found if 1 < len(ranks) < mesh.size]
