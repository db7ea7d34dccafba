"""Work in the background of training, whose results are fetched some steps later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs functions in separate threads, each under a key."""

    def __init__(self):
        self._running: dict[int, _Work] = {}

    def start(self, key: int, function: Callable[[], Any]) -> None:
        """Calls a function in a thread."""
        work = self._running[key] = _Work(function)
        work.start()

    def is_running(self, key: int) -> bool:
        """Whether a result can be fetched."""
        return key in self._running

    def result(self, key: int) -> Any:
        """Waits for the function, and returns its result or raises its exception."""
        work = self._running.pop(key)
        work.join()
        if work.error is not None:
            raise work.error
        return work.returned

    def discard(self) -> None:
        """Waits for all functions, and discards their results."""
        while self._running:
            self._running.popitem()[1].join()


class _Work(threading.Thread):
    def __init__(self, function: Callable[[], Any]):
        super().__init__(name="tfdist-outer-step", daemon=True)
        self._function = function
        self.returned: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.returned = self._function()
        except Exception as error:  # Raised again where the result is fetched.
            self.error = error
