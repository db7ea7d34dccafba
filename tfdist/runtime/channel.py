"""Messages over a connection whose other side has proved itself: JSON objects behind their length."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16


class ProtocolError(TfdistError, ConnectionError):
    """The other side sent what is no message."""


class Channel:
    """Sends and receives JSON objects over a connected socket.

    One thread may send while another receives. After an error the channel is of no more use, and
    the other side counts as gone.

    Args:
        sock: The socket, after the handshake; owned by the channel from here on.
        max_bytes: The longest message, in bytes of JSON; the other side cannot make this one hold
            more than that and one read.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = 1 << 20):
        sock.setblocking(False)
        self._sock, self._max_bytes = sock, max_bytes
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 after `close`."""
        return self._sock.fileno()

    @property
    def own_host(self) -> str:
        """The address of this machine, as the other side reaches it by TCP."""
        return self._sock.getsockname()[0]

    @property
    def other_host(self) -> str:
        """The address from which the other side came by TCP."""
        return self._sock.getpeername()[0]

    def close(self) -> None:
        """Hangs up."""
        self._sock.close()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Sends a message.

        Args:
            message: What JSON can hold.
            timeout: Seconds until the other side must have taken it.

        Raises:
            TimeoutError: It did not. The channel cannot be used any more.
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

        Returns whether the message will be sent. What the kernel does not take now goes with the next
        call.

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
            TimeoutError: None came; the channel can still be used.
            ProtocolError: What came is no message.
            ConnectionError: The other side is gone.
        """
        deadline = time.monotonic() + timeout
        while True:
            message = self.receive_now()
            if message is not None:
                return message
            self._wait(select.POLLIN, deadline)

    def receive_now(self) -> dict[str, Any] | None:
        """The next message if it is there, else None; raises as `receive` does, but for the time."""
        message = self._parse()
        if message is not None:
            return message
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the other side hung up")
        self._incoming += data
        return self._parse()

    def _frame(self, message: dict[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > self._max_bytes:
            raise ValueError(
                f"A message has at most {self._max_bytes} bytes. Received: {len(body)} bytes."
            )
        return _LENGTH.pack(len(body)) + body

    def _parse(self) -> dict[str, Any] | None:
        """Takes the first whole message out of what has come."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._incoming)
        if size > self._max_bytes:
            raise ProtocolError(f"a message of {size} bytes; at most {self._max_bytes} are allowed")
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
            raise ProtocolError("a message that is no JSON object")
        return message

    def _flush(self) -> bool:
        """Gives the kernel what it takes now; returns whether that was all."""
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
