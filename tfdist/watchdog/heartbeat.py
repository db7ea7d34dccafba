"""Heartbeats: a channel independent of the engine, which still works when collectives hang.

One rank runs the server. Every rank has a TCP connection to it and reports its state: once per second, or
less often in worlds of more than 200 ranks. The server answers, and when it detects a failure it sends all
ranks the same verdict. A connection that ends without a last report is a process that died: the kernel
reports it at once.

The connections are those of `tfdist.runtime`, so the server closes unauthenticated ones. No exception ends
a thread of the heartbeats, since the ranks would not be monitored without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.runtime import Channel, Listener, ProtocolError, bind, connect
from tfdist.watchdog.deadlock import DeadlockProof
from tfdist.watchdog.hints import likely_cause
from tfdist.watchdog.report import (
    Report,
    format_collective,
    format_ranks,
    last_seen,
    silent_for,
    whereabouts,
)

_logger = logging.getLogger("tfdist")
_T = TypeVar("_T")

_PURPOSE = "heartbeat server"
#: The rank that runs the server.
_SERVER_RANK = 0
_CONSEQUENCE_SECONDS = 3.0
_TICK_SECONDS = 0.25
#: How long a message of a rank that has ended may take to reach the ranks that wait for it.
_GRACE_SECONDS = 3.0
#: In a large world ranks report less often, to limit the load of the server. A death is still detected at
#: once, by the closed connection.
_REPORTS_PER_SECOND = 200
#: The maximum number of ranks that are checked in each tick; with more ranks the ticks are longer.
_LOOKED_AFTER_PER_TICK = 500
#: The files that the server's rank opens in addition to a connection to each rank.
_OTHER_FILES = 512
#: The timeout of the last report of a rank.
_LAST_WORDS_SECONDS = 2.0


#: The errors that were logged: each function with a type of exception.
_logged: set[tuple[str, type]] = set()


def _guarded(function: Callable[..., _T], *args: Any, default: _T) -> _T:
    """Calls a function whose exceptions must not end a thread, and logs the first of each kind."""
    try:
        return function(*args)
    except Exception as error:
        kind = (getattr(function, "__name__", ""), type(error))
        if kind not in _logged:
            _logged.add(kind)
            with contextlib.suppress(Exception):
                _logger.exception("An error in the watchdog, which continues.")
        return default


class HeartbeatServer:
    """Receives the heartbeats: on one rank, in a separate thread.

    Args:
        size: The number of ranks.
        key: The key that authenticates a rank.
        timeout: Seconds after which a silent rank counts as frozen, and a collective that does not end
            as stuck.
        host: The name or the address of this machine for the other ranks.
    """

    def __init__(self, size: int, key: bytes, timeout: float, host: str = "127.0.0.1"):
        self._size, self._timeout = size, timeout
        self._every = min(max(1.0, size / _REPORTS_PER_SECOND), max(1.0, timeout / 4))
        self._tick = _TICK_SECONDS * max(1.0, size / _LOOKED_AFTER_PER_TICK)
        _raise_file_limit(size + _OTHER_FILES)
        self._listener = Listener([bind(host)], key, _PURPOSE, identities=range(size))
        self.port: int = self._listener.addresses[0][1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._rank_of: dict[Channel, int] = {}
        self._heard: dict[int, float] = {}
        self._reports: dict[int, Report] = {}
        self._gone: dict[int, float] = {}
        self._proof = DeadlockProof()
        self._warned = False
        self._started = time.monotonic()
        self._over, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tfdist-heartbeats", daemon=True)
        self._thread.start()

    def see_out(self) -> None:
        """Waits until every rank has ended or received a verdict.

        The server's process stays until then, as with `MPI_Finalize`: for the other ranks its end
        would look like a failure, and they would not be monitored any more.
        """
        self._over.wait()

    def close(self) -> None:
        """Ends the heartbeats: for the other ranks this one is gone."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        looked = self._told = 0.0
        while not self._closed.is_set() and not _guarded(self._all_ended, default=False):
            if not _guarded(self._hear, default=False):
                time.sleep(_TICK_SECONDS)  # A repeated error must not occupy a whole core.
            if time.monotonic() - looked > self._tick:
                looked = time.monotonic()
                _guarded(self._look, default=None)
        self._over.set()
        self._listener.close()
        for channel in self._rank_of:
            channel.close()
        self._selector.close()

    def _look(self) -> None:
        """Checks the ranks, and sends them a verdict or a sign of life."""
        verdict = _guarded(self._judge, default="")
        now = time.monotonic()
        if verdict:
            self._tell({"verdict": verdict})
        elif now - self._told >= self._every:
            self._told = now
            question = _guarded(self._proof.question, self._reports, default=None)
            self._tell({"alive": True, "every": self._every, "question": question})
        if verdict or self._all_left():
            self._over.set()
        if not self._warned and (warning := self._stuck(min(60.0, self._timeout / 2))):
            self._warned = True
            self._tell({"warning": warning})

    def _hear(self) -> bool:
        """Accepts connections and reads reports, or waits for a moment."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            if isinstance(key.fileobj, Channel):
                self._read(key.fileobj)
        for rank, sock in self._listener.poll():
            if rank in self._reports:
                _logger.warning("A second heartbeat connection of rank %d was closed.", rank)
                sock.close()
                continue
            channel = Channel(sock)
            self._rank_of[channel] = rank
            self._selector.register(channel, selectors.EVENT_READ)
        return True

    def _read(self, channel: Channel) -> None:
        rank = self._rank_of[channel]
        try:
            while (message := channel.receive_now()) is not None:
                self._note(rank, message)
        except OSError as error:
            if isinstance(error, ProtocolError):
                _logger.warning("Rank %d counts as gone: it sent %s.", rank, error)
            self._selector.unregister(channel)
            channel.close()
            del self._rank_of[channel]
            # A rank that has not reported yet has given up this connection and connects again.
            if rank in self._reports and not self._reports[rank].ended:
                self._gone.setdefault(rank, time.monotonic())

    def _note(self, rank: int, message: dict[str, Any]) -> None:
        """Stores the report of a rank; a `ProtocolError` if it is malformed, or another rank's."""
        try:
            report = Report.from_message(message, self._size)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if report.rank != rank:
            raise ProtocolError(f"a report of rank {report.rank}, expected its own")
        self._heard[rank] = time.monotonic()
        before = self._reports.get(rank)
        if before is None or not before.failed:
            self._reports[rank] = report

    def _tell(self, message: dict[str, Any]) -> None:
        # The server's own rank comes last: on a verdict it ends the process.
        for channel in sorted(self._rank_of, key=self._rank_of.__getitem__, reverse=True):
            # A frozen rank does not read, and does not need the message. A rank that is gone is detected
            # in reading.
            with contextlib.suppress(OSError):
                channel.offer(message)

    def _all_ended(self) -> bool:
        """Whether every rank has ended regularly."""
        ended = [report.ended for report in self._reports.values()]
        return len(ended) == self._size and all(ended)

    def _all_left(self) -> bool:
        late = time.monotonic() - self._started > self._timeout
        return (late or len(self._reports) == self._size) and all(
            report.ended or rank in self._gone for rank, report in self._reports.items()
        )

    def _judge(self) -> str:
        """The verdict, or "". The most certain signs of a failure come first."""
        now = time.monotonic()
        for rank, report in sorted(self._reports.items()):
            if report.failed and not report.is_consequence:
                return f"Rank {rank} failed: {report.failed}"
        for rank, since in sorted(self._gone.items(), key=lambda item: item[1]):
            report = self._reports[rank]
            # One second for the last report of a rank that failed to be read first.
            if now - since > 1.0 and not report.failed:
                return f"Rank {rank} is gone: its process died.{last_seen(report)}"
        by_time = sorted(self._heard.items(), key=lambda item: item[1])
        for rank, heard in by_time:
            report = self._reports[rank]
            if report.ended or report.failed or rank in self._gone:
                continue
            if now - heard > self._timeout:
                return f"Rank {rank} {silent_for(now - heard)}{last_seen(report)}"
        if left := self._left_behind() or self._proof.verdict(self._reports):
            return left
        for rank, heard in by_time:
            report = self._reports[rank]
            if report.failed and now - heard > _CONSEQUENCE_SECONDS:
                where = " in a collective" if report.waiting else ""
                return f"Rank {rank} failed{where}: {report.failed}"
        return self._stuck(self._timeout)

    def _left_behind(self) -> str:
        """A rank that ended while others wait for it, or failed in waiting for it."""
        gone = {rank for rank, report in self._reports.items() if report.ended}
        for report in self._reports.values() if gone else ():
            for wait in report.waiting:
                if not report.failed and wait["seconds"] <= _GRACE_SECONDS:
                    continue
                # A report from before they ended may be of a wait that has ended, too.
                heard = math.inf if report.failed else self._heard[report.rank] - self._every
                if ended := [r for r in wait["ranks"] if r in gone and self._heard[r] < heard]:
                    return (
                        f"{likely_cause(wait['name'], [report.rank], ended)}"
                        f"{format_ranks(ended).capitalize()} ended while rank {report.rank} waits in "
                        f"{format_collective(wait, report.doing)}. All ranks must run the same steps."
                    )
        return ""

    def _stuck(self, seconds: float) -> str:
        """A collective that has not ended for a time: who waits, who is missing, and where."""
        reports = self._reports
        waits = (wait for report in reports.values() if not report.ended for wait in report.waiting)
        wait = max(waits, key=lambda wait: wait["seconds"], default=None)
        if wait is None or wait["seconds"] < seconds:
            return ""
        call = wait["name"], wait["occurrence"]
        inside = {
            rank
            for rank, report in reports.items()
            if any((other["name"], other["occurrence"]) == call for other in report.waiting)
        }
        there = [rank for rank in wait["ranks"] if rank in inside]
        missing = [rank for rank in wait["ranks"] if rank not in inside]
        absent = (
            f"Missing: {format_ranks(missing)}."
            if missing
            else "None is missing: the link is stuck."
        )
        lines = [
            f"{likely_cause(wait['name'], there, missing)}{format_collective(wait)} has not ended for "
            f"{wait['seconds']:.0f} s. Waiting: {format_ranks(there)}. {absent}",
            *(f"  rank {rank} {whereabouts(reports.get(rank))}" for rank in missing),
            *(f"  rank {rank} waits at {reports[rank].doing}." for rank in there[:4]),
        ]
        return "\n".join(lines)


class HeartbeatClient:
    """A rank's end of the heartbeats.

    Args:
        rank: This rank.
        address: The server's host and port.
        key: The key that authenticates this rank.
        timeout: Seconds after which a silent server counts as frozen.
        report: Returns the report of this rank; called once per second, or as often as the server
            requests, in a thread of the client.
        on_verdict: Called once with the verdict, in that thread.
        on_warning: Called with a warning.

    Raises:
        AuthenticationError: The process at the address does not have the key.
        TimeoutError: The server could not be reached.
    """

    def __init__(
        self,
        rank: int,
        address: tuple[str, int],
        key: bytes,
        timeout: float,
        *,
        report: Callable[[], Report],
        on_verdict: Callable[[str], None],
        on_warning: Callable[[str], None],
    ):
        self._rank, self._timeout = rank, timeout
        self._report, self._on_verdict, self._on_warning = report, on_verdict, on_warning
        self._lock = threading.Lock()
        self.ended = threading.Event()
        #: The server's last question to all ranks, for `report` to answer.
        self.question: Any = None
        self._channel = Channel(connect(address, key, _PURPOSE, rank, timeout=max(timeout, 10.0)))
        self.say(self._next_report())
        threading.Thread(target=self._attend, name="tfdist-watchdog", daemon=True).start()

    def say(self, report: Report) -> None:
        """Sends a report now, if the server reads; nothing after `close`."""
        with self._lock:
            if not self.ended.is_set():
                self._channel.offer(report.to_message())

    def say_last(self, report: Report) -> None:
        """Sends a report, and waits a moment until the server has it; an `OSError` if it is gone."""
        with self._lock:
            if not self.ended.is_set():
                self._channel.send(report.to_message(), _LAST_WORDS_SECONDS)

    def close(self) -> None:
        """Reports the regular end of this rank."""
        with self._lock, contextlib.suppress(OSError):
            self.ended.set()
            goodbye = Report(self._rank, ended=True)
            self._channel.send(goodbye.to_message(), _LAST_WORDS_SECONDS)

    def _next_report(self) -> Report:
        """The next report; after an error it only shows that this rank is alive."""
        return _guarded(self._report, default=Report(self._rank))

    def _attend(self) -> None:
        every = 1.0
        heard = said = time.monotonic()
        while not self.ended.is_set():
            try:
                message = self._channel.receive(0.5)
                heard = time.monotonic()
                if isinstance(verdict := message.get("verdict"), str):
                    return self._lost(verdict)
                if isinstance(wanted := message.get("every"), float) and wanted >= 1.0:
                    every = wanted
                if (question := message.get("question")) and question != self.question:
                    self.question, said = question, 0.0  # It is answered at once.
                if isinstance(warning := message.get("warning"), str):
                    _guarded(self._on_warning, warning, default=None)
            except TimeoutError:
                pass
            except OSError:
                return self._lost(f"Rank {_SERVER_RANK} is gone: its process died.")
            now = time.monotonic()
            if now - heard > self._timeout:
                return self._lost(f"Rank {_SERVER_RANK} {silent_for(now - heard)}")
            if now - said >= every:
                said = now
                _guarded(self._say_next, default=None)
        with self._lock:
            self._channel.close()
        return None

    def _say_next(self) -> None:
        # A server that is gone is detected in reading.
        with contextlib.suppress(ConnectionError):
            self.say(self._next_report())

    def _lost(self, verdict: str) -> None:
        if not self.ended.is_set():
            _guarded(self._on_verdict, verdict, default=None)


def _raise_file_limit(files: int) -> None:
    """Raises this process's limit of open files: shells often set 1,024, with a higher limit allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    most = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < files:
        _logger.warning(
            "The watchdog opens a connection to each rank, which requires %d files, but %d are allowed. "
            "Raise `ulimit -Hn` on the host of rank 0.",
            files,
            most,
        )
