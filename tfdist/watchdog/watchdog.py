"""The watchdog: ends a job that cannot continue, and prints the reason on every rank that still can."""

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
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.collectives.flight_recorder import InFlight
from tfdist.collectives.objects import broadcast_object
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG
from tfdist.runtime.uncaught import is_anothers, uncaught
from tfdist.utils import checks
from tfdist.utils.checks import one_line
from tfdist.watchdog.deadlock import answer
from tfdist.watchdog.frames import is_idle, runs_code_in, stack_of, users_place
from tfdist.watchdog.heartbeat import HeartbeatClient, HeartbeatServer
from tfdist.watchdog.report import Report

_TENSORFLOW = str(Path(tf.__file__).parent)
#: How long a rank whose collective failed waits for a verdict with the cause.
_VERDICT_SECONDS = 8.0
#: The additional time before a start-up ends in which the timer cannot run.
_LOCKED_SECONDS = 2.0
#: The time after which the collectives of a failed graph count as ended, if the program continues.
_ABANDONED_SECONDS = 20.0


class Watchdog:
    """Monitors this rank's collectives and the other ranks.

    When a rank dies, raises, freezes, ends early, or does not reach a collective within `timeout`
    seconds, every other rank prints the rank, its position and the collective, and ends with exit
    code 75.

    Args:
        engine: The engine whose collectives are monitored.
        timeout: Seconds.
    """

    def __init__(self, engine: Engine, timeout: float):
        checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives")
        checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
        self._engine = engine
        self._since: dict[InFlight, float] = {}
        self._verdict = threading.Event()
        self._main = threading.main_thread().ident or 0
        contact = None
        if engine.rank == 0:
            key = secrets.token_bytes(32)
            self._server = HeartbeatServer(engine.size, key, timeout, engine.host_address())
            # Registered first, it runs after `_leave`, and before the engine shuts down.
            atexit.register(self._server.see_out)
            contact = (engine.host_address(), self._server.port, key)
        host, port, key = broadcast_object(contact, engine.group(), name="watchdog")
        self._client = HeartbeatClient(
            engine.rank,
            (host, port),
            key,
            timeout,
            report=self._report,
            on_verdict=self._end,
            on_warning=self._warn,
        )
        atexit.register(self._leave)
        engine.at_shutdown(self.close)

    def close(self) -> None:
        """Stops monitoring, as the engine's shutdown does; for the other ranks this one has ended."""
        atexit.unregister(self._leave)
        self._client.close()

    def _report(self) -> Report:
        now = time.monotonic()
        recorder = self._engine.recorder
        flying = recorder.in_flight()
        self._since = {call: self._since.get(call, now) for call in flying}
        old = [call for call, since in self._since.items() if now - since > _ABANDONED_SECONDS]
        if old and not runs_code_in(_TENSORFLOW):
            # Their graph has ended, so it has failed, and the program has continued.
            recorder.abandon(old)
        stack = [place for place in stack_of(self._main) if place.file != __file__]
        in_tensorflow = bool(stack) and stack[0].file.startswith(_TENSORFLOW)
        # A graph that still computes may fail, and leave the operations that it waits for.
        blocked = recorder.blocked(self._main, flying, lambda: in_tensorflow and is_idle())
        # The client calls this for a first report before it is assigned.
        question = self._client.question if hasattr(self, "_client") else None
        asked, lacks = answer(question, recorder.has_begun)
        place = users_place(stack)
        report = Report(
            self._engine.rank,
            waiting=[
                {**dataclasses.asdict(call), "seconds": now - since}
                for call, since in sorted(self._since.items(), key=lambda item: item[1])
            ],
            blocked=[dataclasses.asdict(call) for call in blocked],
            asked=asked,
            lacks=lacks,
            doing="its end" if place is None else f"{place.file}:{place.line} in {place.function}",
        )
        # Checked each time, since code at the end of a process may itself wait for another rank.
        error = uncaught()
        return report if error is None else _failed(report, error)

    def _leave(self) -> None:
        """Reports the end of the process, and the exception that caused it."""
        if (error := uncaught()) is not None:
            report = self._safe_report()
            # If the server is gone, the verdict reports that.
            with contextlib.suppress(OSError):
                self._client.say_last(report if report.failed else _failed(report, error))
            if report.is_consequence:
                # The likely cause is the end of another rank, which the verdict names; `_end` exits.
                self._verdict.wait(_VERDICT_SECONDS)
                time.sleep(0.5)
        self._client.close()

    def _safe_report(self) -> Report:
        try:
            return self._report()
        except Exception as error:
            return Report(self._engine.rank, doing=f"an unknown place: {error}")

    def _warn(self, warning: str) -> None:
        _print(f"tfdist watchdog on rank {self._engine.rank}: {warning}")

    def _end(self, verdict: str) -> None:
        self._verdict.set()
        if verdict.startswith(f"Rank {self._engine.rank} failed"):
            return  # This rank is ending already, with its own traceback and exit code.
        try:
            report = self._safe_report()
            verb = "waits" if report.waiting else "is"
            self._warn(f"{verdict}\nThis rank {verb} {report.place}. Ending this rank.")
            sys.stdout.flush()
        finally:
            # Also if printing failed: a rank that does not end would hang.
            os._exit(ENDED_BY_WATCHDOG)


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _failed(report: Report, error: BaseException) -> Report:
    report.failed = one_line(traceback.format_exception_only(error)[-1].strip().splitlines()[0])
    report.is_consequence = bool(report.waiting) or is_anothers(error)
    return report


@contextlib.contextmanager
def startup_guard(timeout: float, what: str) -> Iterator[None]:
    """Ends the process if the context takes over `timeout` seconds; `what` names it in the message."""
    checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
    checks.text("what", what)

    def end():
        try:
            _print(
                f"tfdist watchdog: {what} took more than {timeout:g} s. A rank did not start, died, or "
                "is unreachable. Ending this rank."
            )
        finally:
            os._exit(ENDED_BY_WATCHDOG)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    # TensorFlow waits for its peers with the interpreter locked, so that no Python thread runs. This
    # one is a C thread; it prints the stacks and exits with code 1.
    faulthandler.dump_traceback_later(timeout + _LOCKED_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
