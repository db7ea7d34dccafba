"""The listening side of connections between processes of a job.

Any process can connect to a port, and may send garbage, nothing, or one byte per second, over a thousand
connections at once. The listener serves all callers concurrently, gives each a few seconds for the
handshake, and limits the number of unauthenticated connections.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

from tfdist.runtime.channel import checked_read
from tfdist.runtime.handshake import (
    LARGEST_IDENTITY,
    PROOF_BYTES,
    AuthenticationError,
    ListenerProof,
)
from tfdist.runtime.rate_limit import RateLimit

_logger = logging.getLogger("tfdist")

_BACKLOG = 1024
#: How long new connections wait in the kernel's queue when the listener cannot accept them.
_PAUSE_SECONDS = 0.1
#: A caller has at least this time to answer before a new connection replaces it.
_SETTLE_SECONDS = 0.2
_ACCEPTS_PER_TURN = 32
#: The maximum number of unauthenticated connections. One more closes the oldest.
_MOST_STRANGERS = 64


class Proven(NamedTuple):
    """An authenticated caller.

    Attributes:
        identity: The number that identifies the caller.
        sock: The connection, in non-blocking mode.
    """

    identity: int
    sock: socket.socket


class _Caller:
    """A caller that is not authenticated yet."""

    def __init__(self, sock: socket.socket, address: object, proof: ListenerProof):
        self.sock, self.address, self.proof = sock, address, proof
        self.since = time.monotonic()
        self.received = b""


class Listener(contextlib.AbstractContextManager):
    """Accepts connections on listening sockets and returns those from processes of this job.

    Args:
        sockets: Listening sockets, which the listener owns from here on. `bind` creates one.
        key: The shared key.
        purpose: The purpose of the connections, the same as the callers'. Also the name in the log.
        identities: The identities that a caller may prove.
        handshake_seconds: The timeout of a handshake.

    Attributes:
        addresses: The addresses of the sockets.
        dropped: The number of callers whose connections were closed.
        fileno: Returns a file descriptor that is readable when `poll` has work, for a selector.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        key: bytes,
        purpose: str,
        *,
        identities: Collection[int] = range(LARGEST_IDENTITY + 1),
        handshake_seconds: float = 5.0,
    ):
        self._key, self._purpose, self._identities = key, purpose, identities
        self._handshake_seconds = handshake_seconds
        self._selector = selectors.DefaultSelector()
        self._sockets = list(sockets)
        self.addresses: list = [sock.getsockname() for sock in self._sockets]
        for sock in self._sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._paused_until: float | None = None
        self._limit = RateLimit()
        #: In the order of their arrival.
        self._callers: dict[socket.socket, _Caller] = {}
        #: Those that were authenticated while `accept` waited for one.
        self._ready: list[Proven] = []
        self.dropped = 0
        self.fileno = self._selector.fileno

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening, and closes all connections that were not returned."""
        for sock in [*self._sockets, *self._callers, *(ready.sock for ready in self._ready)]:
            sock.close()
        self._callers.clear()
        self._selector.close()

    def accept(self, deadline: float) -> Proven:
        """Waits until `deadline` for the next authenticated caller; a `TimeoutError` if none came."""
        while not self._ready:
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError(
                    f"no process connected to the {self._purpose} in time, expected one"
                )
            self._ready += self.poll(min(_PAUSE_SECONDS, left))
        return self._ready.pop(0)

    def poll(self, timeout: float = 0.0) -> list[Proven]:
        """Accepts connections, reads proofs, and closes the connections that are late.

        Waits up to `timeout` seconds for an event. Returns the callers that were authenticated in this
        call.
        """
        self._resume()
        proven: list[Proven] = []
        newcomers: list[socket.socket] = []
        for key, _ in self._selector.select(timeout):
            sock = cast(socket.socket, key.fileobj)
            if sock in self._callers:
                if found := self._advance(self._callers[sock]):
                    proven.append(found)
            else:
                newcomers.append(sock)
        # Late callers are dropped after their messages were read: this process may have been busy for
        # longer than the timeout.
        late = time.monotonic() - self._handshake_seconds
        for caller in list(self._callers.values()):
            if caller.since < late:
                self._drop(caller, "no proof arrived in time")
        for sock in newcomers:
            self._take_calls(sock)
        return proven

    def _advance(self, caller: _Caller) -> Proven | None:
        """Reads the available part of a caller's proof; returns the caller once it is complete."""
        try:
            caller.received += checked_read(caller.sock, PROOF_BYTES - len(caller.received))
            if len(caller.received) < PROOF_BYTES:
                return None
            identity, answer = caller.proof.answer(caller.received)
            if identity not in self._identities:
                raise AuthenticationError(f"its identity {identity} is unknown")
            if caller.sock.send(answer) != len(answer):
                raise AuthenticationError("it does not read")
        except OSError as error:
            if not isinstance(error, BlockingIOError) or len(caller.received) == PROOF_BYTES:
                self._drop(caller, error.strerror or str(error))
            return None
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock]
        return Proven(identity, caller.sock)

    def _take_calls(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._limit.is_exceeded():
                self._pause()
                return
            if len(self._callers) >= _MOST_STRANGERS and not self._make_room():
                return
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Out of descriptors or memory: the kernel keeps the caller in its queue, and would
                # report it repeatedly. All other errors in accept(2) concern the caller alone.
                out_of = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                if error.errno not in out_of or not self._make_room():
                    self._pause()
                    return
                continue
            caller = _Caller(sock, address, ListenerProof(self._key, self._purpose))
            self._callers[sock] = caller
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                # The send buffer is empty, so the kernel accepts all; errors are detected in reading.
                sock.send(caller.proof.challenge)
            self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Drops the oldest caller, unless it is very recent; then new connections wait."""
        oldest = next(iter(self._callers.values()), None)
        if oldest is None or time.monotonic() - oldest.since < _SETTLE_SECONDS:
            self._pause()
            return False
        self._drop(oldest, "there were too many connections")
        return True

    def _pause(self) -> None:
        if self._paused_until is None:
            for sock in self._sockets:
                self._selector.unregister(sock)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _resume(self) -> None:
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ)

    def _drop(self, caller: _Caller, why: str) -> None:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock]
        caller.sock.close()
        self.dropped += 1
        self._limit.refused()
        # One line for the first, one for the tenth, and so on.
        if self.dropped == 10 ** (len(str(self.dropped)) - 1):
            _logger.warning(
                "Closed a connection to the %s from %s, which could not be authenticated: %s. %d so far.",
                self._purpose,
                caller.address or "this host",
                why,
                self.dropped,
            )


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A TCP socket that listens at a host's address, for a `Listener`; port 0 selects a free one.

    It listens on all addresses only if `host` does not determine one: a name that resolves to a
    loopback address on its own host, or an address that no interface of this machine has, for example
    behind a router that translates addresses.

    Raises:
        OSError: The port is in use, or the name has no address.
    """
    address = socket.gethostbyname(host)
    if address.startswith("127.") and host not in (address, "localhost"):
        address = ""
    try:
        return socket.create_server((address, port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)
