"""Strangers at the ports of a job: who they are and what they do there."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from tfdist.runtime.caller import connect_once
from tfdist.runtime.handshake import PROOF_BYTES, CallerProof

Address = tuple[str, int]
_SECONDS = 5.0

_GARBAGE = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"PUT /global/0 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"PUT /a/b/c HTTP/1.1\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    b"\n",
    b"[]\n",
    b"[" * 60_000,
    b'{"token": "x", "rank": 1, "ended": true}\n',
    struct.pack("!I", 0xFFFFFFFF),
    bytes(1 << 16),
]


def listening_addresses(process: psutil.Process) -> list[Address]:
    """Where a process and its children listen for TCP."""
    found = set()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in each.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr
                    found.add(("127.0.0.1" if host in ("0.0.0.0", "::") else host, port))
    return sorted(found)


@contextlib.contextmanager
def _calls(address: Address, count: int = 1) -> Iterator[list[socket.socket]]:
    """Connections to an address, as many of them as come about."""
    with contextlib.ExitStack() as stack:
        callers = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                callers.append(stack.enter_context(socket.create_connection(address, 2.0)))
        yield callers


def garbage(address: Address) -> None:
    """Sends what is of no protocol, or of another one."""
    for words in [*_GARBAGE, *(os.urandom(size) for size in (1, 24, PROOF_BYTES, 5000))] * 3:
        with _calls(address) as callers, contextlib.suppress(OSError):
            for caller in callers:
                caller.sendall(words)
                caller.settimeout(0.05)
                caller.recv(4096)


def endless_line(address: Address) -> None:
    """Sends 64 MiB without a newline, if the other side takes it."""
    with _calls(address) as callers, contextlib.suppress(OSError):
        for caller in callers:
            for _ in range(1024):
                caller.sendall(b"A" * (1 << 16))


def half_open(address: Address) -> None:
    """Connects and says nothing, or hangs up in the middle of a word."""
    with _calls(address, 50) as callers:
        for caller in callers[::2]:
            with contextlib.suppress(OSError):
                caller.send(b"P")
        time.sleep(_SECONDS)


def slow(address: Address) -> None:
    """Sends a byte a second."""
    with _calls(address, 20) as callers:
        for byte in b"GET /":
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.send(bytes([byte]))
            time.sleep(_SECONDS / 5)


def wrong_keys(address: Address) -> None:
    """Does the handshake with another key, and with a proof of random bytes."""
    deadline = time.monotonic() + _SECONDS
    for purpose in ("heartbeat server", "direct messages", "rendezvous of ranks", "pool of ranks"):
        with contextlib.suppress(OSError):
            connect_once(address, b"another key", purpose, 1, deadline).close()
        with _calls(address) as callers, contextlib.suppress(OSError):
            for caller in callers:
                caller.settimeout(0.2)
                caller.sendall(CallerProof(b"x", purpose, 0).proof(caller.recv(40)))
                caller.recv(100)


def a_thousand_at_once(address: Address) -> None:
    """Holds 1,000 connections, which all begin at the same time."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(address)
        time.sleep(_SECONDS)


ATTACKS: list[Callable[[Address], None]] = [
    garbage,
    endless_line,
    half_open,
    slow,
    wrong_keys,
    a_thousand_at_once,
]


def attack(addresses: list[Address], strikes: Sequence[Callable[[Address], None]] = ()) -> None:
    """Some attacks, all by default, one after the other; each on all addresses at once."""
    for strike in strikes or ATTACKS:
        threads = [threading.Thread(target=strike, args=(each,)) for each in addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
