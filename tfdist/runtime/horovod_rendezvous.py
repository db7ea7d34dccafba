"""Horovod's rendezvous server, at one address and with limits.

Horovod's own `RendezvousServer` listens on all addresses, holds a thread for as long as a caller
sends a byte now and then, reads bodies of any length, and prints a traceback for an unexpected path.
Its protocol does not support authentication, and its client is compiled into Horovod, so any process
that reaches the port can access the key-value store (`docs/security.md`). The methods overridden here
are those of `http.server` and `socketserver`, except for `do_PUT`, whose two helpers in Horovod are
checked at import.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.runner.http import http_server

from tfdist.runtime.listener import bind
from tfdist.runtime.rate_limit import RateLimit

#: The timeout of a request; those of ranks take milliseconds.
_REQUEST_SECONDS = 5.0
_MOST_CALLERS = 128
#: The delay before the server accepts a connection after many were refused.
_PAUSE_SECONDS = 0.02
#: The limit of a value; Gloo stores addresses.
_MOST_BYTES = 1 << 20
_PATH = re.compile(r"/[^/]+/[^/]+")

for _owner, _name in (
    (http_server.RendezvousHandler, "_put_value"),
    (http_server.RendezvousHandler, "send_status_code"),
    (http_server.RendezvousHTTPServer, "init"),
):
    if not hasattr(_owner, _name):
        raise ImportError(
            f"tfdist requires {_owner.__name__}.{_name} of Horovod 0.28, which this Horovod lacks."
        )


class _Handler(http_server.RendezvousHandler):
    """Answers one request of the kinds that ranks make."""

    timeout = _REQUEST_SECONDS
    #: Whether a complete request of such a kind was received.
    is_rank = False

    def handle_one_request(self) -> None:
        super().handle_one_request()
        if not self.is_rank:
            self.server.limit.refused()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command not in ("GET", "PUT", "DELETE") or not _PATH.fullmatch(self.path):
            self.send_error(http_server.BAD_REQUEST)
            return False
        self.is_rank = self.command != "PUT"
        return True

    def do_PUT(self) -> None:
        given = self.headers.get("Content-Length", "")
        length = int(given) if re.fullmatch("[0-9]{1,9}", given) else _MOST_BYTES + 1
        if length > _MOST_BYTES:
            self.close_connection = True
            self.send_status_code(http_server.BAD_REQUEST)
            return
        value = self.rfile.read(length)
        if len(value) == length:
            self.is_rank = True
            _, scope, key = self.path.split("/")
            self._put_value(scope, key, value)
            self.send_status_code(http_server.OK)


class _Server(http_server.RendezvousHTTPServer):
    """Limits the number of connections, and their duration."""

    daemon_threads = True

    def __init__(self, sock: socket.socket):
        self.limit = RateLimit()
        #: When each caller connected, the oldest first.
        self._callers: dict[socket.socket, float] = {}
        self._callers_lock = threading.Lock()
        self._listening = sock
        super().__init__(sock.getsockname(), _Handler, 0)

    def server_bind(self) -> None:
        # Already bound; HTTPServer would look up the name of the address, which can take long.
        self.socket.close()  # type: ignore[has-type]
        self.socket = self._listening
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    def server_activate(self) -> None:
        """Does nothing: the socket is already listening."""

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.limit.is_exceeded():
            time.sleep(_PAUSE_SECONDS)
        with self._callers_lock:
            self._callers[request] = time.monotonic()
            oldest = next(iter(self._callers)) if len(self._callers) > _MOST_CALLERS else None
        if oldest is not None:
            _hang_up(oldest)
            # The thread of the oldest has time to detect it, which limits the number of threads.
            time.sleep(0.005)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # No more threads.
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._callers_lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: closes the connections that are too old."""
        late = time.monotonic() - _REQUEST_SECONDS
        with self._callers_lock:
            old = [caller for caller, since in self._callers.items() if since < late]
        for caller in old:
            _hang_up(caller)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints no traceback for a closed connection or a malformed request."""


def _hang_up(sock: socket.socket) -> None:
    """Ends the input of the thread that reads from a socket; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serve_rendezvous(addresses: Sequence[str], slots: Sequence[Any]) -> Iterator[int]:
    """Serves until the context exits.

    Args:
        addresses: The addresses of this machine to which the ranks connect. If there are several, the
            server listens on all addresses of the machine.
        slots: Horovod's `SlotInfo` of each rank.

    Yields:
        The port.
    """
    found = set(addresses)
    server = _Server(bind(found.pop() if len(found) == 1 else ""))
    server.init(slots)
    thread = threading.Thread(target=server.serve_forever, name="tfdist-rendezvous", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
