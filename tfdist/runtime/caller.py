"""The calling side of a connection between processes of a job."""

from __future__ import annotations

import contextlib
import socket
import time

from tfdist.runtime.handshake import ANSWER_BYTES, CHALLENGE_BYTES, AuthenticationError, CallerProof

_RETRY_SECONDS = 0.2
#: How long one attempt of a caller may take, which is longer than listeners give it.
_ATTEMPT_SECONDS = 15.0
#: How long a caller repeats a call that is answered by a refusal. Under a flood of strangers an
#: honest caller is refused now and then; one with another key is so each time.
_REFUSED_SECONDS = 30.0

Address = tuple[str, int] | str | bytes


def connect_once(
    address: Address, key: bytes, purpose: str, identity: int, deadline: float
) -> socket.socket:
    """Calls a `Listener`, and has both sides prove that they know the key.

    Args:
        address: A host and a port, or the path of a Unix socket.
        key: What both sides know.
        purpose: What the connection is for, as the listener calls it.
        identity: What this side is to be known by.
        deadline: On the clock of `time.monotonic`.

    Returns:
        The connection.

    Raises:
        AuthenticationError: The other side refused, or did not prove itself.
        OSError: It cannot be reached in time.
    """
    proof = CallerProof(key, purpose, identity)
    with contextlib.ExitStack() as stack:
        if isinstance(address, tuple):
            sock = socket.create_connection(address, timeout=_left(deadline))
            stack.callback(sock.close)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            sock = socket.socket(socket.AF_UNIX)
            stack.callback(sock.close)
            sock.settimeout(_left(deadline))
            sock.connect(address)
        message = proof.proof(_read(sock, CHALLENGE_BYTES, deadline))
        sock.settimeout(_left(deadline))
        sock.sendall(message)
        try:
            proof.check(_read(sock, ANSWER_BYTES, deadline))
        except ConnectionResetError:
            raise AuthenticationError("it refused: the keys differ, or it is overrun") from None
        sock.settimeout(None)
        stack.pop_all()
        return sock


def connect(
    address: Address, key: bytes, purpose: str, identity: int = 0, *, timeout: float
) -> socket.socket:
    """As `connect_once`, again and again for `timeout` seconds: the listener may come up later.

    Raises:
        AuthenticationError: The other side refuses, or does not prove itself.
        TimeoutError: It cannot be reached.
    """
    deadline = time.monotonic() + timeout
    refused_since: float | None = None
    while True:
        try:
            attempt = min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
            return connect_once(address, key, purpose, identity, attempt)
        except OSError as error:
            now = time.monotonic()
            refused = isinstance(error, AuthenticationError)
            refused_since = (refused_since or now) if refused else None
            said = f"The {purpose} at {_shown(address)} cannot be joined: {error}."
            if refused_since and now - refused_since > min(_REFUSED_SECONDS, timeout / 2):
                raise AuthenticationError(said) from error
            if now + _RETRY_SECONDS > deadline:
                raise (AuthenticationError if refused else TimeoutError)(said) from error
            time.sleep(_RETRY_SECONDS)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        sock.settimeout(_left(deadline))
        part = sock.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side hung up")
        received += part
    return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side did not answer in time")
    return left


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
