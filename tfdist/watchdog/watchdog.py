"""The watchdog: ends a job that cannot go on, and says why, on every rank that still can speak."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import broadcast_object
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG
from tfdist.runtime.uncaught import uncaught
from tfdist.utils import checks
from tfdist.utils.checks import one_line
from tfdist.watchdog.deadlock import answer
from tfdist.watchdog.frames import Place, is_idle, runs_code_in, stack_of, users_place
from tfdist.watchdog.heartbeat import HeartbeatClient, HeartbeatServer
from tfdist.watchdog.report import Report, collective_words

_TENSORFLOW = str(Path(tf.__file__).parent)
#: How long a rank whose collective failed waits to hear what made it fail.
_VERDICT_SECONDS = 8.0
#: How much later than the timer a start-up ends in which the timer cannot run.
_LOCKED_SECONDS = 2.0
#: How long after a graph has failed, if the program goes on, its collectives count as over.
_ABANDONED_SECONDS = 20.0


class Watchdog:
    """Watches this rank's collectives and the other ranks' lives.

    When a rank dies, raises, freezes, ends early, or does not come to a collective within
    `timeout` seconds, every other rank prints which, where it was, and what was waited for, and
    ends with exit code 75.

    Args:
        engine: The engine whose collectives are watched.
        timeout: Seconds.
    """

    def __init__(self, engine: Engine, timeout: float):
        checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives")
        checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
        self._engine = engine
        self._since: dict[tuple, float] = {}
        self._verdict = threading.Event()
        self._main = threading.main_thread().ident or 0
        contact = None
        if engine.rank == 0:
            key = secrets.token_bytes(32)
            self._server = HeartbeatServer(engine.size, key, timeout, engine.host_address())
            # Registered first, it runs after the goodbye, and before the engine shuts down.
            atexit.register(self._server.see_out)
            contact = (engine.host_address(), self._server.port, key)
        host, port, key = broadcast_object(contact, engine.group(), name="watchdog")
        #: What the server last asked; the client wants a first report while it is made.
        self._question: Callable[[], Any] = lambda: None
        self._client = client = HeartbeatClient(
            engine.rank,
            (host, port),
            key,
            timeout,
            report=self._report,
            on_verdict=self._end,
            on_warning=self._warn,
        )
        self._question = lambda: client.question
        atexit.register(self._leave)
        engine.at_shutdown(self.close)

    def close(self) -> None:
        """Stops watching, as the engine's shutdown does; the other ranks count this one as ended."""
        atexit.unregister(self._leave)
        self._client.close()

    def _report(self) -> Report:
        now = time.monotonic()
        flying = self._engine.recorder.in_flight()
        keys = [(op.name, op.ranks, op.occurrence) for op in flying]
        self._since = {key: self._since.get(key, now) for key in keys}
        old = [
            op
            for op, key in zip(flying, keys, strict=True)
            if now - self._since[key] > _ABANDONED_SECONDS
        ]
        if old and not runs_code_in(_TENSORFLOW):
            # The graph that they were in is over, so it has failed, and the program has gone on.
            self._engine.recorder.abandon(old)
        waiting: list[dict[str, Any]] = [
            {
                "name": op.name,
                "ranks": list(op.ranks),
                "occurrence": op.occurrence,
                "seconds": now - self._since[key],
            }
            for op, key in zip(flying, keys, strict=True)
        ]
        waiting.sort(key=lambda wait: -wait["seconds"])
        stack = [place for place in stack_of(self._main) if place.file != __file__]
        in_tensorflow = bool(stack) and stack[0].file.startswith(_TENSORFLOW)
        # A graph that computes, too, may fail by itself, and leave what it waits for.
        blocked = self._engine.recorder.blocked(
            self._main, flying, lambda: in_tensorflow and is_idle()
        )
        asked, lacks = answer(self._question(), self._engine.recorder.has_begun)
        report = Report(
            self._engine.rank,
            waiting=waiting,
            blocked=[dataclasses.asdict(call) for call in blocked],
            asked=asked,
            lacks=lacks,
            doing=_place_words(stack),
        )
        # Looked for each time, as what runs at a process' end may itself wait for another rank.
        error = uncaught()
        return report if error is None else _failed(report, error)

    def _leave(self) -> None:
        """At the end of the process: says what ended it, if an exception did, and goodbye."""
        error = uncaught()
        if error is not None:
            self._say_failure(error)
        self._client.close()

    def _say_failure(self, error: BaseException) -> None:
        try:
            report = self._report()
        except Exception as failure:
            doing = f"a place that cannot be told: {failure}"
            report = _failed(Report(self._engine.rank, doing=doing), error)
        # Where the server is gone the verdict says so.
        with contextlib.suppress(OSError):
            self._client.say_last(report)
        if report.in_collective:
            # The likely cause is another rank's end. Its name is worth a moment; `_end` exits.
            self._verdict.wait(_VERDICT_SECONDS)
            time.sleep(0.5)

    def _warn(self, warning: str) -> None:
        print(
            f"tfdist watchdog on rank {self._engine.rank}: {warning}", file=sys.stderr, flush=True
        )

    def _end(self, verdict: str) -> None:
        self._verdict.set()
        if verdict.startswith(f"Rank {self._engine.rank} failed"):
            return  # This rank is ending by itself, with its own traceback and exit code.
        try:
            self._warn(f"{verdict}\n{self._own_place()}Ending this rank.")
            sys.stdout.flush()
        finally:
            # Also where the words could not be written: a rank that stays would hang.
            os._exit(ENDED_BY_WATCHDOG)

    def _own_place(self) -> str:
        try:
            report = self._report()
        except Exception as error:
            return f"Where this rank is cannot be told: {error}. "
        if not report.waiting:
            return f"This rank is at {report.doing}. "
        return (
            f"This rank waits in {collective_words(report.waiting[0])}, called at {report.doing}. "
        )


def _place_words(stack: Sequence[Place]) -> str:
    """Where a thread stands: the innermost line of the user's."""
    place = users_place(stack)
    return "its end" if place is None else f"{place.file}:{place.line} in {place.function}"


def _failed(report: Report, error: BaseException) -> Report:
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    report.failed = one_line(summary)
    report.in_collective = bool(report.waiting)
    return report


@contextlib.contextmanager
def startup_guard(timeout: float, what: str) -> Iterator[None]:
    """Ends the process if what is inside takes over `timeout` seconds; `what` is for the message."""
    checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
    checks.text("what", what)

    def end():
        try:
            print(
                f"tfdist watchdog: {what} took more than {timeout:g} s. A rank did not start, "
                "died, or cannot be reached. Ending this rank.",
                file=sys.stderr,
                flush=True,
            )
        finally:
            os._exit(ENDED_BY_WATCHDOG)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    # TensorFlow waits for its peers with the interpreter locked, so that no thread of Python runs.
    # This one is none; it prints the stacks and exits with code 1.
    faulthandler.dump_traceback_later(timeout + _LOCKED_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
