"""Messages over an authenticated connection: JSON objects, each preceded by its length."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16


class ProtocolError(TfdistError, ConnectionError):
    """The other side sent something other than a message of the protocol."""


def checked_read(sock: socket.socket, size: int) -> bytes:
    """Reads from 1 to `size` bytes, or raises `ConnectionResetError` if the connection is closed."""
    data = sock.recv(size)
    if not data:
        raise ConnectionResetError("the connection was closed, more bytes were expected")
    return data


def has_fields(found: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Whether `found` is a dict with exactly these fields of these types; booleans are not numbers."""
    return (
        isinstance(found, dict)
        and found.keys() == kinds.keys()
        and all(isinstance(found[name], kind) for name, kind in kinds.items())
        and not any(isinstance(found[name], bool) and kinds[name] is not bool for name in kinds)
    )


class Channel:
    """Sends and receives JSON objects over a connected socket.

    One thread may send while another receives. After an error the channel cannot be used any more,
    and the other side counts as gone.

    Args:
        sock: The socket, after the handshake; from here on the channel owns it.
        max_bytes: The longest message, in bytes of JSON. The receive buffer never exceeds it by
            more than one read.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = 1 << 20):
        sock.setblocking(False)
        self._sock, self._max_bytes = sock, max_bytes
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._sending = threading.Lock()
        #: The file descriptor, for selectors; -1 after `close`.
        self.fileno = sock.fileno
        self.close = sock.close

    @property
    def own_host(self) -> str:
        """The TCP address of this side."""
        return self._sock.getsockname()[0]

    @property
    def other_host(self) -> str:
        """The TCP address of the other side."""
        return self._sock.getpeername()[0]

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Sends a message.

        Args:
            message: A JSON-serializable dict.
            timeout: Seconds within which the other side must accept it.

        Raises:
            TimeoutError: The message was not accepted in time. The channel cannot be used any more.
            ConnectionError: The other side is gone.
            ValueError: The message is too long.
        """
        framed = self._frame(message)
        deadline = time.monotonic() + timeout
        with self._sending:
            self._outgoing += framed
            while not self._flush():
                self._wait(select.POLLOUT, deadline)

    def offer(self, message: dict[str, Any]) -> bool:
        """Sends a message unless the other side does not read; never waits.

        Returns whether the message will be sent. Bytes that the kernel does not accept now are sent
        with the next call.

        Raises:
            ConnectionError: The other side is gone.
            ValueError: The message is too long.
        """
        framed = self._frame(message)
        with self._sending:
            self._flush()
            if len(self._outgoing) + len(framed) > self._max_bytes + _LENGTH.size:
                return False
            self._outgoing += framed
            self._flush()
        return True

    def receive(self, timeout: float) -> dict[str, Any]:
        """Waits up to `timeout` seconds for the next message.

        Raises:
            TimeoutError: No message arrived; the channel can still be used.
            ProtocolError: The other side sent something other than a message.
            ConnectionError: The other side is gone.
        """
        deadline = time.monotonic() + timeout
        while (message := self.receive_now()) is None:
            self._wait(select.POLLIN, deadline)
        return message

    def receive_now(self) -> dict[str, Any] | None:
        """The next message, or None if it has not arrived; raises as `receive` does, but no timeout."""
        message = self._parse()
        if message is not None:
            return message
        try:
            self._incoming += checked_read(self._sock, _READ_BYTES)
        except BlockingIOError:
            return None
        return self._parse()

    def _frame(self, message: dict[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > self._max_bytes:
            raise ValueError(
                f"A message must have at most {self._max_bytes} bytes. Received: {len(body)} bytes."
            )
        return _LENGTH.pack(len(body)) + body

    def _parse(self) -> dict[str, Any] | None:
        """Removes the first complete message from the buffer and returns it."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._incoming)
        if size > self._max_bytes:
            raise ProtocolError(f"a message of {size} bytes, expected at most {self._max_bytes}")
        end = _LENGTH.size + size
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that is not JSON: {one_line(error)}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a message that is not a JSON object")
        return message

    def _flush(self) -> bool:
        """Sends the bytes that the kernel accepts now; returns whether these were all."""
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        return not self._outgoing

    def _wait(self, event: int, deadline: float) -> None:
        # Not `select`, which fails for descriptors of 1,024 and more.
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the other side did not answer in time")
