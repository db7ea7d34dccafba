"""The assignment of variables to servers, balanced by bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Assigns each variable to a server: the largest first, each to the server with the fewest bytes.

    The fullest server gets at most 4/3 of its load in the best assignment (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        sizes: Bytes of each variable.
        num_servers: The number of servers.

    Returns:
        The server of each variable.
    """
    loads = [(0, server) for server in range(num_servers)]
    places = [0] * len(sizes)
    # The sort is stable, so all workers find the same assignment.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, server = heapq.heappop(loads)
        places[index] = server
        heapq.heappush(loads, (load + sizes[index], server))
    return places
