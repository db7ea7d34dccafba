"""Connects the ranks that send messages to each other.

Each connection begins with the handshake of `tfdist.runtime`; then the socket belongs to the
library of `tfdist.backend.native`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import socket
import time

from tfdist.backend.native import TRANSPORT, functions
from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object
from tfdist.collectives.p2p.engine import P2PEngine, flush
from tfdist.collectives.rank_sets import rank_sets
from tfdist.runtime import Listener, bind, connect
from tfdist.runtime.caller import connect_once

_logger = logging.getLogger("tfdist")

_CONNECT_SECONDS = 30.0
_PURPOSE = "peer-to-peer messages"


def with_p2p(engine: Engine) -> Engine:
    """Connects this rank with others; called by all ranks of the world at the same time.

    The higher rank of a pair connects to the lower one, over a Unix socket if they share a host. The
    shared key is sent over the engine.

    Args:
        engine: A running engine, by which the ranks exchange their addresses.

    Returns:
        An engine that wraps the given one. The engine itself if a rank does not have the library, or is
        unreachable; the result is the same on every rank, and logged.
    """
    if engine.size == 1:
        return engine
    groups = [tuple(range(engine.size)), *rank_sets(engine.mesh)]
    world = engine.group()
    built = TRANSPORT.find() is not None
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(bind(engine.host_address()))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0tfdist-{secrets.token_hex(16)}")  # A name without a file.
        unix.listen()
        addresses = ((engine.host_address(), tcp.getsockname()[1]), unix.getsockname())
        card = (built, socket.gethostname(), addresses, secrets.token_bytes(32))
        cards = all_gather_object(card, world, name="p2p/addresses")
        lacking = [rank for rank, card in enumerate(cards) if not card[0]]
        if lacking:
            _logger.info(
                "Latency-critical collectives use %s: ranks %s do not have the library for peer-to-peer "
                "messages, which tfdist-install-horovod builds.",
                engine.name,
                lacking,
            )
            return engine
        hosts = [card[1] for card in cards]
        own_groups = (ranks for ranks in groups if engine.rank in ranks)
        near = set().union(*(P2PEngine.partners(ranks, engine.rank, hosts) for ranks in own_groups))
        callers = {rank for rank in near if rank > engine.rank}
        listener = stack.enter_context(
            Listener([tcp, unix], cards[0][3], _PURPOSE, identities=callers)
        )
        problem, connected = None, {}
        try:
            connected = _connect_all(engine.rank, near - callers, cards, listener, len(callers))
        except OSError as error:
            problem = f"rank {engine.rank}: {error}"
        problems = list(filter(None, all_gather_object(problem, world, name="p2p/connected")))
    if problems:
        for sock in connected.values():
            sock.close()
        _logger.warning(
            "Latency-critical collectives use %s, which is slower: ranks could not connect to each "
            "other. %s",
            engine.name,
            "; ".join(problems),
        )
        return engine
    library = functions()
    for rank, sock in connected.items():
        library.tfdist_add_peer(rank, sock.detach())
    atexit.register(flush)
    return P2PEngine(engine, hosts, connected)


def _connect_all(
    own: int, lower: set[int], cards: list, listener: Listener, num_callers: int
) -> dict[int, socket.socket]:
    """A connected socket for each rank.

    Raises:
        OSError: A rank could not be reached, or did not connect.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    key, host = cards[0][3], cards[own][1]
    connected: dict[int, socket.socket] = {}
    try:
        for rank in sorted(lower):
            _, its_host, (tcp, unix), _ = cards[rank]
            if host == its_host:
                # Hosts with the same name, such as containers, may not share a Unix socket.
                with contextlib.suppress(ConnectionError):
                    connected[rank] = connect_once(unix, key, _PURPOSE, own, deadline)
            if rank not in connected:
                left = max(0.1, deadline - time.monotonic())
                connected[rank] = connect(tcp, key, _PURPOSE, own, timeout=left)
        while len(connected) < len(lower) + num_callers:
            rank, sock = listener.accept(deadline)
            if rank in connected:
                connected[
                    rank
                ].close()  # The rank has given up that connection and connected again.
            connected[rank] = sock
    except OSError:
        for sock in connected.values():
            sock.close()
        raise
    for sock in connected.values():
        sock.settimeout(None)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected
