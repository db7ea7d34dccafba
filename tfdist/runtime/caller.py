"""The calling side of a connection between processes of a job."""

from __future__ import annotations

import contextlib
import socket
import time

from tfdist.runtime.channel import checked_read
from tfdist.runtime.handshake import ANSWER_BYTES, CHALLENGE_BYTES, AuthenticationError, CallerProof

_RETRY_SECONDS = 0.2
#: The timeout of one attempt of a caller, which is longer than that of listeners.
_ATTEMPT_SECONDS = 15.0
#: How long a caller retries after a refusal. During a flood of unauthenticated connections an
#: authorized caller is refused now and then; a caller with a wrong key is refused each time.
_REFUSED_SECONDS = 30.0

Address = tuple[str, int] | str | bytes


def connect_once(
    address: Address, key: bytes, purpose: str, identity: int, deadline: float
) -> socket.socket:
    """Connects to a `Listener`; both sides prove that they have the key.

    Args:
        address: A host and a port, or the path of a Unix socket.
        key: The shared key.
        purpose: The purpose of the connection, the same as the listener's.
        identity: The number that identifies this side.
        deadline: On the clock of `time.monotonic`.

    Returns:
        The connection.

    Raises:
        AuthenticationError: The other side refused the connection, or did not prove itself.
        OSError: The other side could not be reached in time.
    """
    proof = CallerProof(key, purpose, identity)
    with contextlib.ExitStack() as stack:
        if isinstance(address, tuple):
            sock = socket.create_connection(address, timeout=_left(deadline))
            stack.enter_context(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(_left(deadline))
            sock.connect(address)
        message = proof.proof(_read(sock, CHALLENGE_BYTES, deadline))
        sock.settimeout(_left(deadline))
        sock.sendall(message)
        try:
            proof.check(_read(sock, ANSWER_BYTES, deadline))
        except ConnectionResetError:
            raise AuthenticationError(
                "could not authenticate: the keys differ, or the listener is overloaded"
            ) from None
        sock.settimeout(None)
        stack.pop_all()
        return sock


def connect(
    address: Address, key: bytes, purpose: str, identity: int = 0, *, timeout: float
) -> socket.socket:
    """As `connect_once`, with retries for `timeout` seconds: the listener may start later.

    Raises:
        AuthenticationError: The other side refuses the connection, or does not prove itself.
        TimeoutError: The other side could not be reached.
    """
    deadline = time.monotonic() + timeout
    shown = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
    refused_since: float | None = None
    while True:
        try:
            attempt = min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
            return connect_once(address, key, purpose, identity, attempt)
        except OSError as error:
            now = time.monotonic()
            refused = isinstance(error, AuthenticationError)
            refused_since = (refused_since or now) if refused else None
            message = f"Could not connect to the {purpose} at {shown}: {error}."
            if refused_since and now - refused_since > min(_REFUSED_SECONDS, timeout / 2):
                raise AuthenticationError(message) from error
            if now + _RETRY_SECONDS > deadline:
                raise (AuthenticationError if refused else TimeoutError)(message) from error
            time.sleep(_RETRY_SECONDS)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        sock.settimeout(_left(deadline))
        received += checked_read(sock, size - len(received))
    return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side did not answer in time")
    return left
