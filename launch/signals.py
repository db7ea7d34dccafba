"""The signals that end a program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `SystemExit` inside, as SIGINT raises `KeyboardInterrupt`.

    An ignored signal stays ignored, such as SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
