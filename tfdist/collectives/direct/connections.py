"""Connects the ranks that are to reach each other directly."""

from __future__ import annotations

import atexit
import ctypes
import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfdist.collectives.direct.exchange import Direct
from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object
from tfdist.native import functions, library_path

__all__ = ["Traffic", "close", "connect", "flush", "traffic"]

_logger = logging.getLogger("tfdist")

_CONNECT_SECONDS = 30.0
_FLUSH_SECONDS = 5.0
_HELLO = struct.Struct("!16si")


def connect(engine: Engine, groups: Iterable[Sequence[int]]) -> Direct | None:
    """Connects this rank with others; called by all ranks of the world at once.

    The higher rank of a pair calls the lower one, over a Unix socket where they share a host. The
    number that proves a caller to be of this job travels over the engine.

    Args:
        engine: A running engine, by which the ranks tell their addresses.
        groups: The ranks of each group that is to talk; the same on all ranks.

    Returns:
        The operations; None where a rank lacks the library or cannot be reached, which is then
        the answer on every rank, and logged.
    """
    world = engine.group()
    built = library_path().exists()
    with _Door(engine.host_address()) as door:
        cards = all_gather_object(
            (built, socket.gethostname(), door.addresses, secrets.token_bytes(16)),
            world,
            name="direct/addresses",
        )
        lacking = [rank for rank, card in enumerate(cards) if not card[0]]
        if lacking:
            _logger.info(
                "Collectives that a layer waits for go over %s: ranks %s lack the library for "
                "direct messages, which tfdist-install-horovod builds.",
                engine.name,
                lacking,
            )
            return None
        hosts = [card[1] for card in cards]
        near: set[int] = set()
        for ranks in groups:
            if engine.rank in ranks:
                near |= Direct.partners(ranks, engine.rank, hosts)
        problem, connected = None, {}
        try:
            connected = _connect_all(engine.rank, sorted(near), cards, door)
        except OSError as error:
            problem = f"rank {engine.rank}: {error}"
        problems = [
            told for told in all_gather_object(problem, world, name="direct/connected") if told
        ]
    if problems:
        for line in connected.values():
            line.close()
        _logger.warning(
            "Collectives that a layer waits for go over %s, which is slower: ranks cannot reach "
            "each other directly. %s",
            engine.name,
            "; ".join(problems),
        )
        return None
    library = functions()
    for rank, line in connected.items():
        library.tfdist_add_peer(rank, line.detach())
    atexit.register(flush)
    return Direct(hosts, connected)


def flush(seconds: float = _FLUSH_SECONDS) -> None:
    """Waits until what was sent has left this process, for as long as `seconds`."""
    functions().tfdist_flush(seconds)


def close() -> None:
    """Ends the connections, once all that was sent has left this process."""
    flush()
    functions().tfdist_close()


class Traffic(NamedTuple):
    """Bytes of tensors, so far.

    Attributes:
        sent: By this process directly.
        received: From others.
        lent: Of those sent, what others have copied from this process's memory.
    """

    sent: int
    received: int
    lent: int


def traffic() -> Traffic:
    """The bytes of tensors that this process has exchanged directly."""
    counts = [ctypes.c_int64() for _ in Traffic._fields]
    functions().tfdist_traffic(*map(ctypes.byref, counts))
    return Traffic(*(count.value for count in counts))


class _Door:
    """Where others call: a TCP port, and a Unix socket without a file for those of this host."""

    def __init__(self, address: str):
        self._listeners = [socket.create_server((address, 0)), _unix_socket()]
        self._listeners[1].bind(f"\0tfdist-{secrets.token_hex(16)}")
        self._listeners[1].listen()
        self.addresses = [listener.getsockname() for listener in self._listeners]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for listener in self._listeners:
            listener.close()

    def accept(self, key: bytes, deadline: float) -> tuple[int, socket.socket]:
        """The next caller of this job, and who it is."""
        while time.monotonic() < deadline:
            for listener in self._listeners:
                listener.settimeout(0.01)
                try:
                    line, _ = listener.accept()
                except TimeoutError:
                    continue
                line.settimeout(max(0.1, deadline - time.monotonic()))
                said, rank = _HELLO.unpack(_read(line, _HELLO.size))
                if hmac.compare_digest(said, key):
                    return rank, line
                line.close()
        raise TimeoutError(f"not all others called within {_CONNECT_SECONDS:.0f} s")


def _connect_all(own: int, ranks: list[int], cards: list, door: _Door) -> dict:
    """A connected socket for each rank.

    Raises:
        OSError: One cannot be reached, or does not call.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    key, host = cards[0][3], cards[own][1]
    connected = {}
    for rank in ranks:
        if rank < own:
            _, its_host, addresses, _ = cards[rank]
            connected[rank] = line = _call(addresses, host == its_host, deadline)
            line.sendall(_HELLO.pack(key, own))
    while len(connected) < len(ranks):
        rank, line = door.accept(key, deadline)
        connected[rank] = line
    for line in connected.values():
        line.settimeout(None)
        if line.family == socket.AF_INET:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _call(addresses: list, same_host: bool, deadline: float) -> socket.socket:
    tcp, unix = addresses
    if same_host:
        line = _unix_socket()
        try:
            line.connect(unix)
        except ConnectionRefusedError:
            # Hosts of one name: containers, say.
            line.close()
        else:
            return line
    return socket.create_connection(tcp, timeout=max(0.1, deadline - time.monotonic()))


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _read(line: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        part = line.recv(size - len(said))
        if not part:
            raise ConnectionError("a caller hung up")
        said += part
    return said
