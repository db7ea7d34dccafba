"""Horovod's rendezvous server, at one address and with bounds.

Horovod's own `RendezvousServer` listens on all addresses, holds a thread for as long as a caller
sends a byte now and then, reads bodies of any length, and prints a traceback for a path that it
does not expect. Its protocol has no place for a proof of who calls, and the ranks' end of it is
compiled into Horovod, so the key-value store stays open to who reaches its port;
`docs/security.md` says so. What is overridden here is of `http.server` and `socketserver`, but for
`do_PUT`, whose two helpers of Horovod are checked when this is imported.
"""

from __future__ import annotations

import collections
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

#: A rank's request takes milliseconds; who takes longer is no rank.
_REQUEST_SECONDS = 5.0
_MOST_CALLERS = 128
#: How long the server rests before it takes a call, where many were refused of late.
_PAUSE_SECONDS = 0.02
#: What Gloo stores under a key is an address.
_MOST_BYTES = 1 << 20
_PATH = re.compile(r"/[^/]+/[^/]+")

for _owner, _name in (
    (http_server.RendezvousHandler, "_put_value"),
    (http_server.RendezvousHandler, "send_status_code"),
    (http_server.RendezvousHTTPServer, "init"),
):
    if not hasattr(_owner, _name):
        raise ImportError(
            f"tfdist relies on {_owner.__name__}.{_name} of Horovod 0.28, which this Horovod lacks."
        )


class _Handler(http_server.RendezvousHandler):
    """Answers one request, if it is one that ranks make."""

    timeout = _REQUEST_SECONDS
    #: Whether a whole request came that ranks make.
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
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _MOST_BYTES:
            self.close_connection = True
            self.send_status_code(http_server.BAD_REQUEST)
            return
        value = self.rfile.read(int(length))
        if len(value) == int(length):
            self.is_rank = True
            _, scope, key = self.path.split("/")
            self._put_value(scope, key, value)
            self.send_status_code(http_server.OK)


class _Server(http_server.RendezvousHTTPServer):
    """Holds few callers, and each for a short time."""

    daemon_threads = True

    def __init__(self, sock: socket.socket):
        self.limit = RateLimit()
        #: When each caller came, the oldest first.
        self._callers: collections.OrderedDict[socket.socket, float] = collections.OrderedDict()
        self._callers_lock = threading.Lock()
        self._listening = sock
        super().__init__(sock.getsockname(), _Handler, 0)

    def server_bind(self) -> None:
        # Bound already; HTTPServer would look up the name of the address, which can take long.
        self.socket.close()  # type: ignore[has-type]
        self.socket = self._listening
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    def server_activate(self) -> None:
        """It listens already."""

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.limit.is_exceeded():
            time.sleep(_PAUSE_SECONDS)
        with self._callers_lock:
            self._callers[request] = time.monotonic()
            oldest = next(iter(self._callers)) if len(self._callers) > _MOST_CALLERS else None
        if oldest is not None:
            _hang_up(oldest)
            # The thread of the oldest is given a moment to see it, so that threads stay few.
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
        """Called twice a second: hangs up on who came too long ago."""
        late = time.monotonic() - _REQUEST_SECONDS
        with self._callers_lock:
            old = [caller for caller, since in self._callers.items() if since < late]
        for caller in old:
            _hang_up(caller)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller hung up, or talked nonsense: nothing to print a traceback for."""


def _hang_up(sock: socket.socket) -> None:
    """Has the thread that reads from a socket see its end; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serve_rendezvous(addresses: Sequence[str], slots: Sequence[Any]) -> Iterator[int]:
    """Serves until the context ends.

    Args:
        addresses: The addresses of this machine at which the ranks call. Where they are more than
            one, the server listens on all of the machine's.
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
