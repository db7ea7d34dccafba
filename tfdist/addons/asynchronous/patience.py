"""Calls that may never return, with a check whether the server still listens.

A gRPC call of TensorFlow to a server that has ended waits until its time-out, because another server
may start at the same address. So calls run in threads, and the caller checks regularly whether the
server's port is open.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_LOOK_SECONDS = 0.5
#: A host that does not respond at all may be disconnected for a moment.
_UNREACHABLE_SECONDS = 15.0


class ServerEndedError(ConnectionError):
    """No process listens at the address any more."""


class PatientCaller:
    """Makes calls to one server.

    Args:
        address: Its "host:port".
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._has_answered = False
        self.has_ended = False

    def wait_until_listening(self, seconds: float) -> None:
        """Waits until the server listens: an earlier call would retry at growing intervals.

        Raises:
            ServerEndedError: The server did not listen in time.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(self._address, timeout=_LOOK_SECONDS).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise ServerEndedError(
                        f"the server did not start to listen: {error}"
                    ) from error
            time.sleep(0.1)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in another thread, and returns its result.

        Raises:
            ServerEndedError: The server has responded before, but no process listens now.
        """
        if self.has_ended:
            raise ServerEndedError("the server is not running: an earlier call found that it ended")
        done = threading.Event()
        result: list = []
        with self._lock:
            starts = self._idle == 0
            self._idle -= not starts
        if starts:
            # A daemon thread: one that waits for a dead server must not keep the process alive.
            threading.Thread(target=self._serve, daemon=True, name="tfdist-calls").start()
        self._calls.put((function, done, result))
        refused, silent_since = 0, None
        while not done.wait(_LOOK_SECONDS):
            if not self._has_answered:
                continue  # It may not have started yet.
            try:
                socket.create_connection(self._address, timeout=_LOOK_SECONDS).close()
                refused, silent_since = 0, None
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                silent_since = silent_since or time.monotonic()
            is_silent = silent_since and time.monotonic() - silent_since > _UNREACHABLE_SECONDS
            if refused > 1 or is_silent:
                self.has_ended = True
                raise ServerEndedError("the server is not listening any more")
        value, error = result
        if error is not None:
            raise error
        self._has_answered = True
        return value

    def _serve(self) -> None:
        while True:
            function, done, result = self._calls.get()
            try:
                result += [function(), None]
            except Exception as error:
                result += [None, error]
            with self._lock:
                self._idle += 1
            done.set()
            # So that an idle thread does not keep results alive.
            del function, done, result
