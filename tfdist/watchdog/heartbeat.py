"""Heartbeats: a channel beside the engine, over which ranks still speak when collectives hang.

One rank runs the server. Every rank holds a TCP connection to it and reports what it is doing: once a
second, or less often in worlds of more than 200 ranks. The server answers, and when something is wrong
it tells all ranks the same verdict. A connection that ends without a goodbye is a process that died: the
kernel says so at once.

Connections are those of `tfdist.runtime`: the server hangs up on strangers. No exception ends a
thread of the heartbeats, since nobody would watch over the ranks without them.
"""

from __future__ import annotations

import contextlib
import logging
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
    collective_words,
    last_seen,
    rank_words,
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
#: How long what a rank sent before it ended may be on its way to those that wait for it.
_GRACE_SECONDS = 3.0
#: In a large world ranks report less often, so that the server has no more to read than this. A death is
#: seen at once all the same, by the connection that ends.
_REPORTS_PER_SECOND = 200
#: As many ranks are looked after in each tick; of more ones the server looks less often.
_LOOKED_AFTER_PER_TICK = 500
#: What the rank of the server opens beside a connection to each rank.
_OTHER_FILES = 512
#: How long the last words of a rank may take to be sent.
_LAST_WORDS_SECONDS = 2.0


class _Guard:
    """Calls functions whose exceptions must not end a thread, and logs the first of each kind."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, type]] = set()

    def __call__(self, function: Callable[..., _T], *args: Any, default: _T) -> _T:
        try:
            return function(*args)
        except Exception as error:
            kind = (getattr(function, "__name__", ""), type(error))
            if kind not in self._seen:
                self._seen.add(kind)
                with contextlib.suppress(Exception):
                    _logger.exception("An error in the watchdog, which goes on.")
            return default


class HeartbeatServer:
    """Receives the heartbeats: on one rank, in a thread of its own.

    Args:
        size: The number of ranks.
        key: What a rank must know to be let in.
        timeout: Seconds after which a rank that says nothing counts as frozen, and a collective
            that does not end as stuck.
        host: The name or the address by which the other ranks know this machine.
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
        self._over = threading.Event()
        self._closed = threading.Event()
        self._guard = _Guard()
        self._thread = threading.Thread(target=self._serve, name="tfdist-heartbeats", daemon=True)
        self._thread.start()

    def see_out(self) -> None:
        """Waits until every rank has left or heard a verdict.

        The server's process stays until then, as under `MPI_Finalize`: to the others its end
        would look like a death, and no one would watch over them.
        """
        self._over.wait()

    def close(self) -> None:
        """Ends the heartbeats: to the other ranks this one is gone."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        looked = self._told = 0.0
        while not self._closed.is_set() and not self._guard(self._all_ended, default=False):
            if not self._guard(self._hear, default=False):
                time.sleep(_TICK_SECONDS)  # An error that comes again must not take a whole core.
            if time.monotonic() - looked > self._tick:
                looked = time.monotonic()
                self._guard(self._look, default=None)
        self._over.set()
        self._listener.close()
        for channel in self._rank_of:
            channel.close()
        self._selector.close()

    def _look(self) -> None:
        """Looks after the ranks, and tells them that it does."""
        verdict = self._guard(self._judge, default="")
        now = time.monotonic()
        if verdict:
            self._tell({"verdict": verdict})
        elif now - self._told >= self._every:
            self._told = now
            question = self._guard(self._proof.question, self._reports, default=None)
            self._tell({"alive": True, "every": self._every, "question": question})
        if verdict or self._all_left():
            self._over.set()
        if not self._warned and (warning := self._stuck(min(60.0, self._timeout / 2))):
            self._warned = True
            self._tell({"warning": warning})

    def _hear(self) -> bool:
        """Takes calls and reads what ranks say, or waits for a moment."""
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
            # One without a report has been called off: its rank calls anew.
            if rank in self._reports and not self._reports[rank].ended:
                self._gone.setdefault(rank, time.monotonic())

    def _note(self, rank: int, message: dict[str, Any]) -> None:
        """Takes down what a rank says; a `ProtocolError` where it is no report, or another rank's."""
        try:
            report = Report.from_message(message, self._size)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if report.rank != rank:
            raise ProtocolError(f"a report of rank {report.rank}")
        self._heard[rank] = time.monotonic()
        before = self._reports.get(rank)
        if before is None or not before.failed:
            self._reports[rank] = report

    def _tell(self, message: dict[str, Any]) -> None:
        # The server's own rank comes last: on a verdict it ends the process.
        for channel in sorted(self._rank_of, key=lambda c: -self._rank_of[c]):
            # A frozen rank does not read; what it misses will not matter to it. One that is gone
            # is seen where it is read.
            with contextlib.suppress(OSError):
                channel.offer(message)

    def _all_ended(self) -> bool:
        """Whether every rank has said goodbye, and nobody is left to be watched over."""
        ended = [report.ended for report in self._reports.values()]
        return len(ended) == self._size and all(ended)

    def _all_left(self) -> bool:
        late = time.monotonic() - self._started > self._timeout
        return (late or len(self._reports) == self._size) and all(
            report.ended or rank in self._gone for rank, report in self._reports.items()
        )

    def _judge(self) -> str:
        """What ended the job, or "". The order is that of how sure each sign is."""
        now = time.monotonic()
        for rank, report in sorted(self._reports.items()):
            if report.failed and not report.in_collective:
                return f"Rank {rank} failed: {report.failed}"
        for rank, since in sorted(self._gone.items(), key=lambda item: item[1]):
            report = self._reports[rank]
            # One second for the last word of a rank that failed to be read first.
            if now - since > 1.0 and not report.failed:
                return f"Rank {rank} is gone: its process died.{last_seen(report)}"
        for rank, heard in sorted(self._heard.items(), key=lambda item: item[1]):
            report = self._reports[rank]
            if report.ended or report.failed or rank in self._gone:
                continue
            if now - heard > self._timeout:
                return f"Rank {rank} {silent_for(now - heard)}{last_seen(report)}"
        if left := self._left_behind() or self._proof.verdict(self._reports):
            return left
        failed = [(self._heard[r.rank], r) for r in self._reports.values() if r.failed]
        if failed and now - min(failed, key=lambda item: item[0])[0] > _CONSEQUENCE_SECONDS:
            report = min(failed, key=lambda item: item[0])[1]
            return f"Rank {report.rank} failed in a collective: {report.failed}"
        return self._stuck(self._timeout)

    def _left_behind(self) -> str:
        """A rank that said goodbye while others wait for it, or failed in waiting for it."""
        gone = {rank for rank, report in self._reports.items() if report.ended}
        if not gone:
            return ""
        for report in self._reports.values():
            for wait in report.waiting:
                if not report.failed and wait["seconds"] <= _GRACE_SECONDS:
                    continue
                if ended := [rank for rank in wait["ranks"] if rank in gone]:
                    return likely_cause(wait["name"], [report.rank], ended) + (
                        f"{rank_words(ended).capitalize()} ended while rank {report.rank} waits in "
                        f"{collective_words(wait)}, called at {report.doing}. All ranks must run the "
                        "same steps."
                    )
        return ""

    def _stuck(self, seconds: float) -> str:
        """A collective that has not ended for so long: who waits, who is missing, and where."""
        oldest = max(
            (
                (wait["seconds"], report.rank, wait)
                for report in self._reports.values()
                if not report.ended
                for wait in report.waiting
            ),
            key=lambda item: item[0],
            default=None,
        )
        if oldest is None or oldest[0] < seconds:
            return ""
        wait = oldest[2]
        there: list[int] = []
        missing: list[int] = []
        for rank in wait["ranks"]:
            report = self._reports.get(rank)
            at = report is not None and any(
                (w["name"], w["occurrence"]) == (wait["name"], wait["occurrence"])
                for w in report.waiting
            )
            (there if at else missing).append(rank)
        lines = [
            likely_cause(wait["name"], there, missing)
            + f"{collective_words(wait)} has not ended for {oldest[0]:.0f} s. Waiting: "
            f"{rank_words(there)}. "
            + (
                f"Missing: {rank_words(missing)}."
                if missing
                else "None is missing: the link is stuck."
            )
        ]
        lines += [f"  rank {rank} {whereabouts(self._reports.get(rank))}" for rank in missing]
        lines += [f"  rank {rank} waits at {self._reports[rank].doing}." for rank in there[:4]]
        return "\n".join(lines)


class HeartbeatClient:
    """A rank's end of the heartbeats.

    Args:
        rank: This rank.
        address: The server's host and port.
        key: What lets this rank in.
        timeout: Seconds without a word after which the server counts as frozen.
        report: Returns what to say; called once a second, or as often as the server asks, in a thread
            of the client's own.
        on_verdict: Called once with the verdict, in that thread.
        on_warning: Called with a warning.

    Raises:
        AuthenticationError: What listens at the address does not know the key.
        TimeoutError: The server cannot be reached.
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
        self._guard = _Guard()
        self._lock = threading.Lock()
        self.ended = threading.Event()
        #: What the server last asked all ranks, for `report` to answer.
        self.question: Any = None
        self._every = 1.0
        self._channel = Channel(connect(address, key, _PURPOSE, rank, timeout=max(timeout, 10.0)))
        self.say(self._next_report())
        threading.Thread(target=self._attend, name="tfdist-watchdog", daemon=True).start()

    def say(self, report: Report) -> None:
        """Sends a report now, if the server reads; after the goodbye nothing more."""
        with self._lock:
            if not self.ended.is_set():
                self._channel.offer(report.to_message())

    def say_last(self, report: Report) -> None:
        """Sends a report, and waits a moment until the server has it; an `OSError` if it is gone."""
        with self._lock:
            if not self.ended.is_set():
                self._channel.send(report.to_message(), _LAST_WORDS_SECONDS)

    def close(self) -> None:
        """Says goodbye."""
        with self._lock, contextlib.suppress(OSError):
            self.ended.set()
            goodbye = Report(self._rank, ended=True)
            self._channel.send(goodbye.to_message(), _LAST_WORDS_SECONDS)

    def _next_report(self) -> Report:
        """What to say; in an emergency no more than that this rank lives."""
        return self._guard(self._report, default=Report(self._rank))

    def _attend(self) -> None:
        heard = said = time.monotonic()
        while not self.ended.is_set():
            try:
                message = self._channel.receive(0.5)
                heard = time.monotonic()
                if isinstance(verdict := message.get("verdict"), str):
                    return self._lost(verdict)
                if isinstance(every := message.get("every"), float) and every >= 1.0:
                    self._every = every
                if (question := message.get("question")) and question != self.question:
                    self.question, said = question, 0.0  # It is answered at once.
                if isinstance(warning := message.get("warning"), str):
                    self._guard(self._on_warning, warning, default=None)
            except TimeoutError:
                pass
            except OSError:
                return self._lost(f"Rank {_SERVER_RANK} is gone: its process died.")
            now = time.monotonic()
            if now - heard > self._timeout:
                return self._lost(f"Rank {_SERVER_RANK} {silent_for(now - heard)}")
            if now - said >= self._every:
                said = now
                self._guard(self._say_next, default=None)
        with self._lock:
            self._channel.close()
        return None

    def _say_next(self) -> None:
        # A server that is gone is seen where it is read.
        with contextlib.suppress(ConnectionError):
            self.say(self._next_report())

    def _lost(self, verdict: str) -> None:
        if not self.ended.is_set():
            self._guard(self._on_verdict, verdict, default=None)


def _raise_file_limit(files: int) -> None:
    """Lets this process open so many files: shells often set 1,024, with a higher limit allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    most = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < files:
        _logger.warning(
            "The watchdog holds a connection to each rank, for which %d files are needed and %d allowed: "
            "raise `ulimit -Hn` on the host of rank 0.",
            files,
            most,
        )
