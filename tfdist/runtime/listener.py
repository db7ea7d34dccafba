"""Where processes of a job call each other: the listening side.

A port is open to everybody, so a stranger may send garbage, nothing, or one byte a second, and may
do so a thousand times at once. The listener serves all callers at the same time, gives each a few
seconds for the handshake, holds few strangers, and hangs up on the others.
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

from tfdist.runtime.handshake import (
    LARGEST_IDENTITY,
    PROOF_BYTES,
    AuthenticationError,
    ListenerProof,
)
from tfdist.runtime.rate_limit import RateLimit

_logger = logging.getLogger("tfdist")

_BACKLOG = 1024
#: How long the listener lets newcomers wait in the kernel's queue when it cannot take them.
_PAUSE_SECONDS = 0.1
#: A caller is not hung up on for the sake of a newcomer before it had this time to answer.
_SETTLE_SECONDS = 0.2
_ACCEPTS_PER_TURN = 32


class Proven(NamedTuple):
    """A caller that has proved itself.

    Attributes:
        identity: The number that it has proved to be known by.
        sock: The connection, in non-blocking mode.
    """

    identity: int
    sock: socket.socket


class _Caller:
    """A caller that has not yet proved itself."""

    def __init__(self, sock: socket.socket, address: object, proof: ListenerProof):
        self.sock, self.address, self.proof = sock, address, proof
        self.since = time.monotonic()
        self.received = b""


class Listener:
    """Takes calls on listening sockets and hands out those that prove to be of this job.

    Args:
        sockets: Sockets that listen; owned by the listener from here on. `bind` makes one.
        key: What the callers must know.
        purpose: What the connections are for; callers name the same. Also its name in the log.
        identities: Which identities a caller may prove.
        handshake_seconds: How long a caller has to prove itself.
        max_strangers: How many callers may be about to prove themselves. One more ends the call of
            the oldest.

    Attributes:
        dropped: How many callers were hung up on.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        key: bytes,
        purpose: str,
        *,
        identities: Collection[int] = range(LARGEST_IDENTITY + 1),
        handshake_seconds: float = 5.0,
        max_strangers: int = 64,
    ):
        self._key, self._purpose, self._identities = key, purpose, identities
        self._handshake_seconds, self._max_strangers = handshake_seconds, max_strangers
        self._selector = selectors.DefaultSelector()
        self._sockets = list(sockets)
        for sock in self._sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._paused_until: float | None = None
        self._limit = RateLimit()
        #: In the order in which they came.
        self._callers: dict[socket.socket, _Caller] = {}
        #: Those that have proved themselves while `accept` waited for one.
        self._ready: list[Proven] = []
        self.dropped = 0

    @property
    def addresses(self) -> list:
        """Where the sockets listen."""
        return [sock.getsockname() for sock in self._sockets]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has work, for the selector of a caller."""
        return self._selector.fileno()

    def close(self) -> None:
        """Stops listening, and hangs up on all that were not handed out."""
        for sock in [*self._sockets, *self._callers, *(ready.sock for ready in self._ready)]:
            sock.close()
        self._callers.clear()
        self._selector.close()

    def accept(self, deadline: float) -> Proven:
        """Waits until `deadline` for the next caller that proves itself; else a `TimeoutError`."""
        while not self._ready:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody else called for the {self._purpose} in time")
            self._ready += self.poll(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
        return self._ready.pop(0)

    def poll(self, timeout: float = 0.0) -> list[Proven]:
        """Takes calls, reads proofs, and hangs up on who is late.

        Waits up to `timeout` seconds for something to do. Returns the callers that have proved
        themselves in this call.
        """
        self._resume()
        proven: list[Proven] = []
        newcomers: list[socket.socket] = []
        for key, _ in self._selector.select(timeout):
            sock = cast(socket.socket, key.fileobj)
            if sock in self._callers:
                found = self._advance(self._callers[sock])
                proven += [found] if found else []
            else:
                newcomers.append(sock)
        # Those who are late are looked for after their words were read: this process may have
        # been busy for longer than they have.
        late = time.monotonic() - self._handshake_seconds
        for caller in list(self._callers.values()):
            if caller.since < late:
                self._drop(caller, "nothing came in time")
        for sock in newcomers:
            self._take_calls(sock)
        return proven

    def _advance(self, caller: _Caller) -> Proven | None:
        """Reads of a caller's proof what is there."""
        try:
            data = caller.sock.recv(PROOF_BYTES - len(caller.received))
        except BlockingIOError:
            return None
        except OSError as error:
            self._drop(caller, error.strerror or "an error")
            return None
        if not data:
            self._drop(caller, "it hung up")
            return None
        caller.received += data
        if len(caller.received) < PROOF_BYTES:
            return None
        try:
            identity, answer = caller.proof.answer(caller.received)
            if identity not in self._identities:
                raise AuthenticationError(f"the identity {identity}, which nobody has")
            if caller.sock.send(answer) != len(answer):
                raise AuthenticationError("it does not read")
        except OSError as error:
            self._drop(caller, str(error))
            return None
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock]
        return Proven(identity, caller.sock)

    def _take_calls(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._limit.is_exceeded():
                self._pause()
                return
            if len(self._callers) >= self._max_strangers and not self._make_room():
                return
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Out of descriptors or memory: the kernel keeps the caller in its queue, and would
                # report it again and again. All else that accept(2) lists is the caller's trouble.
                out_of = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                if error.errno not in out_of or not self._make_room():
                    self._pause()
                    return
                continue
            caller = _Caller(sock, address, ListenerProof(self._key, self._purpose))
            self._callers[sock] = caller
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                # Nothing was sent yet, so the kernel takes it all; who is gone is seen in reading.
                sock.send(caller.proof.challenge)
            self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Hangs up on the oldest caller, unless that has only just come; then newcomers wait."""
        oldest = next(iter(self._callers.values()), None)
        if oldest is None or time.monotonic() - oldest.since < _SETTLE_SECONDS:
            self._pause()
            return False
        self._drop(oldest, "too many called at once")
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
                "Hung up on a caller of the %s from %s, which did not prove to be of this job: "
                "%s. %d so far.",
                self._purpose,
                caller.address or "this host",
                why,
                self.dropped,
            )


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A TCP socket that listens at a host's address, for a `Listener`; port 0 is one that is free.

    It listens on all addresses only where `host` does not say which: a name that its own host
    takes for a loopback address, or an address that no interface of this machine has, as behind a
    router that translates addresses.

    Raises:
        OSError: The port is taken, or the name has no address.
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
