"""The roll call: a channel beside the engine, over which ranks still speak when collectives hang.

One rank keeps the roll. Every rank holds a TCP connection to it and says once a second what it is
doing; the keeper answers, and when something is wrong it tells all ranks the same verdict. A
connection that ends without a goodbye is a process that died: the kernel says so at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tfdist.monitoring.causes import likely_cause

__all__ = ["Keeper", "Member", "Report"]

_CONSEQUENCE_SECONDS = 3.0


@dataclasses.dataclass
class Report:
    """What a rank says of itself.

    Attributes:
        rank: The rank.
        waiting: The collectives under way: a list of dicts with `name`, `ranks`, `occurrence`
            and `seconds`, how long.
        doing: Where the main thread stands, in words.
        ended: Said goodbye.
        failed: The exception that ends it, or "".
        in_collective: Whether a collective was under way when it failed.
    """

    rank: int
    waiting: list = dataclasses.field(default_factory=list)
    doing: str = ""
    ended: bool = False
    failed: str = ""
    in_collective: bool = False


class Keeper:
    """Keeps the roll: on one rank, in a thread of its own.

    Args:
        size: The number of ranks.
        token: What a rank shows to be let in.
        timeout: Seconds after which a rank that says nothing counts as frozen, and a collective
            that does not end as stuck.
    """

    def __init__(self, size: int, token: str, timeout: float):
        self._size, self._token, self._timeout = size, token, timeout
        self._listener = socket.create_server(("", 0), backlog=size)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytes] = {}
        self._rank_of: dict[socket.socket, int] = {}
        self._heard: dict[int, float] = {}
        self._reports: dict[int, Report] = {}
        self._gone: dict[int, float] = {}
        self._warned = False
        self._started = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._serve, name="tfdist-roll-call", daemon=True).start()

    def see_out(self) -> None:
        """Waits until every rank has left or heard a verdict.

        The keeper's process stays for so long, as under `MPI_Finalize`: to the others its end
        would look like a death, and no one would watch over them.
        """
        self._over.wait()

    def _serve(self) -> None:
        try:
            self._keep()
        finally:
            self._over.set()

    def _keep(self) -> None:
        checked = 0.0
        while True:
            for key, _ in self._selector.select(0.25):
                if key.fileobj is self._listener:
                    channel, _ = self._listener.accept()
                    channel.setblocking(False)
                    self._buffers[channel] = b""
                    self._selector.register(channel, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            if time.monotonic() - checked > 0.25:
                checked = time.monotonic()
                verdict = self._judge()
                self._tell({"verdict": verdict} if verdict else {"alive": True})
                if verdict or self._all_left():
                    self._over.set()
                if not self._warned and (warning := self._stuck(min(60.0, self._timeout / 2))):
                    self._warned = True
                    self._tell({"warning": warning})

    def _read(self, channel: socket.socket) -> None:
        try:
            data = channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(channel)
            channel.close()
            self._buffers.pop(channel)
            rank = self._rank_of.pop(channel, None)
            if rank is not None and not self._reports[rank].ended:
                self._gone.setdefault(rank, time.monotonic())
            return
        *lines, self._buffers[channel] = (self._buffers[channel] + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.pop("token", None) != self._token:
                continue
            report = Report(**message)
            self._rank_of[channel] = report.rank
            self._heard[report.rank] = time.monotonic()
            before = self._reports.get(report.rank)
            if before is None or not before.failed:
                self._reports[report.rank] = report

    def _tell(self, message: dict) -> None:
        line = json.dumps(message).encode() + b"\n"
        # The keeper's own rank comes last: on a verdict it ends the process.
        for channel in sorted(self._rank_of, key=lambda c: -self._rank_of[c]):
            # A frozen rank does not read; what it misses will not matter to it.
            with contextlib.suppress(OSError):
                channel.send(line)

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
                return f"Rank {rank} is gone: its process died.{_last_seen(report)}"
        for rank, heard in sorted(self._heard.items(), key=lambda item: item[1]):
            report = self._reports[rank]
            if report.ended or report.failed or rank in self._gone:
                continue
            if now - heard > self._timeout:
                return (
                    f"Rank {rank} shows no sign of life since {now - heard:.0f} s: it is frozen, or "
                    f"its machine cannot be reached.{_last_seen(report)}"
                )
        if left := self._left_behind():
            return left
        failed = [(self._heard[r.rank], r) for r in self._reports.values() if r.failed]
        if failed and now - min(failed, key=lambda item: item[0])[0] > _CONSEQUENCE_SECONDS:
            report = min(failed, key=lambda item: item[0])[1]
            return f"Rank {report.rank} failed in a collective: {report.failed}"
        return self._stuck(self._timeout)

    def _left_behind(self) -> str:
        """A rank that said goodbye while others wait for it, or failed in waiting for it."""
        for report in self._reports.values():
            for wait in report.waiting:
                ended = [r for r in wait["ranks"] if r in self._reports and self._reports[r].ended]
                if ended and (report.failed or wait["seconds"] > 5.0):
                    ended_ranks = _ranks(ended)
                    return likely_cause(wait["name"], [report.rank], ended) + (
                        f"{ended_ranks[0].upper()}{ended_ranks[1:]} ended while rank {report.rank} "
                        f"waits for it in {wait['name']} (time {wait['occurrence']}). All ranks "
                        "must run the same steps."
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
            + f"{wait['name']} (time {wait['occurrence']}) does not end since {oldest[0]:.0f} s: "
            f"{_ranks(there)} {'waits' if len(there) == 1 else 'wait'} there, "
            + (f"missing: {_ranks(missing)}." if missing else "none is missing: the link is stuck.")
        ]
        for rank in missing:
            report = self._reports.get(rank)
            lines.append(f"  rank {rank} {_whereabouts(report)}")
        return "\n".join(lines)


class Member:
    """A rank's end of the roll call.

    Args:
        rank: This rank.
        address: The keeper's host and port.
        token: What lets this rank in.
        timeout: Seconds without a word after which the keeper counts as frozen.
        report: Returns what to say; called once a second, in a thread of the roll call's own.
        on_verdict: Called once with the verdict, in that thread.
        on_warning: Called with a warning.
        keeper: The rank that keeps the roll.
    """

    def __init__(
        self,
        rank: int,
        address: tuple[str, int],
        token: str,
        timeout: float,
        *,
        report: Callable[[], Report],
        on_verdict: Callable[[str], None],
        on_warning: Callable[[str], None],
        keeper: int = 0,
    ):
        self._rank, self._token, self._timeout, self._keeper = rank, token, timeout, keeper
        self._report, self._on_verdict, self._on_warning = report, on_verdict, on_warning
        self._channel = socket.create_connection(address, timeout=max(timeout, 10.0))
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.say(report())
        threading.Thread(target=self._attend, name="tfdist-watchdog", daemon=True).start()

    def say(self, report: Report) -> None:
        """Sends a report now; after the goodbye nothing more."""
        with self._lock:
            if not self.ended.is_set():
                self._send(report)

    def close(self) -> None:
        """Says goodbye."""
        with self._lock, contextlib.suppress(OSError):
            self.ended.set()
            self._send(Report(self._rank, ended=True))

    def _send(self, report: Report) -> None:
        line = json.dumps({"token": self._token, **dataclasses.asdict(report)}).encode() + b"\n"
        self._channel.sendall(line)

    def _attend(self) -> None:
        buffer, heard, said = b"", time.monotonic(), time.monotonic()
        while not self.ended.is_set():
            self._channel.settimeout(0.5)
            try:
                data = self._channel.recv(1 << 16)
                if not data:
                    return self._lost(f"Rank {self._keeper} is gone: its process died.")
                heard = time.monotonic()
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "warning" in message:
                        self._on_warning(message["warning"])
                    if "verdict" in message:
                        return self._lost(message["verdict"])
            except TimeoutError:
                pass
            except OSError:
                return self._lost(f"Rank {self._keeper} is gone: its process died.")
            now = time.monotonic()
            if now - heard > self._timeout:
                return self._lost(
                    f"Rank {self._keeper} shows no sign of life since {now - heard:.0f} s: it is "
                    "frozen, or its machine cannot be reached."
                )
            if now - said >= 1.0:
                said = now
                with contextlib.suppress(OSError):
                    self.say(self._report())
        return None

    def _lost(self, verdict: str) -> None:
        if not self.ended.is_set():
            self._on_verdict(verdict)


def _ranks(ranks) -> str:
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _last_seen(report: Report) -> str:
    if report.waiting:
        wait = report.waiting[0]
        return f" Last seen in {wait['name']} (time {wait['occurrence']})."
    return f" Last seen at {report.doing}." if report.doing else ""


def _whereabouts(report: Report | None) -> str:
    if report is None:
        return "never answered the roll call."
    if report.ended:
        return "has ended."
    if report.waiting:
        wait = report.waiting[0]
        return f"waits in {wait['name']} (time {wait['occurrence']}) instead."
    return f"is at {report.doing}."
