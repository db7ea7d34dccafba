"""Calls that may never return, and a look at whether who is called still listens.

A call of TensorFlow's over gRPC waits until its time-out for a server that has ended: it hopes for
another at the same address. So calls run in threads, and who waits for one looks from time to time
whether the server's port is open.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_LOOK_SECONDS = 0.5
#: A host that does not answer at all may have a cable out for a moment.
_UNREACHABLE_SECONDS = 15.0


class ServerEndedError(ConnectionError):
    """Nothing listens at the address any more."""


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
        """Returns once the server listens: a call before that would try again ever more rarely.

        Raises:
            ServerEndedError: It does not in time.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(self._address, timeout=_LOOK_SECONDS).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise ServerEndedError(f"nothing listens there: {error}") from error
            time.sleep(0.1)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in another thread, and returns what it returns.

        Raises:
            ServerEndedError: The server has answered before, and now nothing listens.
        """
        if self.has_ended:
            raise ServerEndedError("it had ended before")
        done = threading.Event()
        result: list = []
        with self._lock:
            starts = self._idle == 0
            self._idle -= not starts
        if starts:
            # A daemon: one that waits for a dead server is not to keep the process alive.
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
                raise ServerEndedError("nothing listens there")
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
            # So that an idle thread does not keep what it returned.
            del function, done, result
