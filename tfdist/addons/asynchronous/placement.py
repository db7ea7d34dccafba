"""Which server holds which variable: balanced by bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Gives each variable a server: the largest first, each to the server with the fewest bytes.

    The fullest server gets at most 4/3 of what the best division would give it (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        sizes: Bytes of each variable.
        num_servers: How many servers there are.

    Returns:
        The server of each variable.
    """
    loads = [(0, server) for server in range(num_servers)]
    places = [0] * len(sizes)
    # Stable, so that all workers find the same.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, server = heapq.heappop(loads)
        places[index] = server
        heapq.heappush(loads, (load + sizes[index], server))
    return places
