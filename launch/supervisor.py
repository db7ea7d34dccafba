"""Ranks as one job: started together, heard together, ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from tfdist.launch.command import say
from tfdist.launch.interruption import LastWords
from tfdist.launch.output import RankOutput
from tfdist.launch.processes import RankProcess, signal_name
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG, PREEMPTED, USAGE
from tfdist.runtime.orphan_guard import OrphanGuard

#: How long ranks may go on after one has failed: the watchdog's verdict takes a few seconds, and
#: its words are worth more than a quick end.
_GRACE_SECONDS = 8.0
#: Where a rank is frozen the watchdog's time has passed already.
_GRACE_AFTER_FREEZE_SECONDS = 4.0
#: A wrong setting is told by the rank itself, and the others have the same.
_GRACE_AFTER_USAGE_SECONDS = 0.5
#: Servers end by themselves when the ranks have said good-bye, which one that was killed has not.
_GRACE_OF_SERVERS_SECONDS = 1.5
_TERMINATE_SECONDS = 3.0
_LOOK_SECONDS = 0.2
#: Read at a time, so that a rank that never stops talking does not keep the others from being
#: heard. A pipe of Linux holds as much.
_CHUNK = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Supervisor:
    """Runs the processes of several ranks, and answers for all of them.

    Output is passed on line by line behind `[rank]`. The job ends when every rank has ended; when
    one fails the others get a few seconds to say why and are then ended too, by SIGTERM and by
    SIGKILL.

    Args:
        starts: What starts each rank, and after these each parameter server.
        servers: How many of them are parameter servers. A rank that fails then does not end the job:
            the others go on. A server that ends before them does.
        frozen_seconds: How long a rank may be stopped (SIGSTOP) before it counts as failed; 0 for
            any time.
        save_seconds: How long ranks have to save after a SIGTERM.
        has_gpu: Whether ranks may have GPUs: then what CUDA says at the start is no noise.
        should_end: Asked now and then; once it says yes the ranks get a SIGTERM.
        newest_checkpoint: Returns the newest one that was saved, or None where none is known.

    Attributes:
        was_asked: Whether `should_end` did.
        failed: The rank that made the job fail, and its exit code; None where none did.
        failed_at: When the job began to end, in seconds of the wall clock; None while it runs.
    """

    was_asked = False
    failed: tuple[int, int] | None = None
    failed_at: float | None = None

    def __init__(
        self,
        starts: Sequence[Callable[[], RankProcess]],
        *,
        frozen_seconds: float,
        servers: int = 0,
        save_seconds: float = 30.0,
        has_gpu: bool = True,
        should_end: Callable[[], bool] = lambda: False,
        newest_checkpoint: Callable[[], str | None] = lambda: None,
    ):
        self._starts = starts
        self._size = len(starts) - servers
        self._servers = range(self._size, len(starts))
        self._frozen_seconds = frozen_seconds
        self._save_seconds, self._should_end = save_seconds, should_end
        self._newest_checkpoint = newest_checkpoint
        self._output = RankOutput(self._write, has_gpu=has_gpu)
        self._ranks: list[RankProcess] = []
        self._outputs: dict[int, IO[bytes]] = {}
        self._unfinished: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._looked = 0.0
        self._stopped_since: dict[int, float] = {}
        self._ends: list[tuple[int, int]] = []
        self._ended_here: set[int] = set()
        self._frozen: int | None = None
        self._signal: int | None = None
        self._is_urgent = False
        self._last_words = LastWords()

    def run(self) -> int:
        """Runs the job and returns its exit code: that of the rank that failed first, or 0.

        A rank that a signal killed counts as 128 plus the signal's number, as in a shell.

        Raises:
            UsageError: The command cannot be run.
        """
        with OrphanGuard() as self._guard, self._handle_signals():
            try:
                for rank, start in enumerate(self._starts):
                    if self._signal is None:
                        self._start(rank, start())
                self._watch()
            finally:
                self._end(signal.SIGKILL)
                for process in self._ranks:
                    process.wait()
                self._reap()
        return self._conclude()

    @property
    def was_told(self) -> bool:
        """Whether a signal to this process ended the job."""
        return self._signal is not None

    def _start(self, rank: int, process: RankProcess) -> None:
        self._ranks.append(process)
        self._guard.watch(process.pid)
        if self._signal is not None:
            self._forward(self._signal)  # It came while the rank was being started.
        self._outputs[rank] = process.output
        self._unfinished[rank] = bytearray()
        self._selector.register(process.output, selectors.EVENT_READ, rank)

    # -- while it runs ----------------------------------------------------------------------

    def _watch(self) -> None:
        ending_since: float | None = None
        steps: list[tuple[float, int]] = []
        while len(self._ends) < len(self._ranks):
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.data is None:
                    self._woken.recv(_CHUNK)
                else:
                    self._pass_on(key.data)
            self._reap()
            self._look_for_frozen()
            failed = self._has_failed()
            if not (failed or self.was_told or self.was_asked) and self._should_end():
                self.was_asked = True
                self._forward(signal.SIGTERM)
            is_over = bool(self._servers) and self._running_ranks() == 0
            if not (
                failed or is_over or self.was_told or self.was_asked or self._frozen is not None
            ):
                continue
            if self._is_urgent:
                self._end(signal.SIGKILL)
            if ending_since is None:
                ending_since, self.failed_at = time.monotonic(), time.time()
                grace = self._grace()
                steps = [(grace, signal.SIGTERM), (grace + _TERMINATE_SECONDS, signal.SIGKILL)]
            if all(rank in self._stopped_since for rank in self._running()):
                self._end(signal.SIGKILL)  # Who is left is frozen, and has nothing to say.
            while steps and time.monotonic() - ending_since > steps[0][0]:
                self._end(steps.pop(0)[1])

    def _has_failed(self) -> bool:
        """Whether something ended that the job cannot go on without."""
        if not self._servers:
            return any(code for _, code in self._ends)
        ended = dict(self._ends)
        if self._running_ranks() == 0:
            return ended.get(0, 0) != 0
        return any(
            code == USAGE or (rank in self._servers and code != 0) for rank, code in self._ends
        )

    def _running_ranks(self) -> int:
        """How many ranks have not ended, servers left out."""
        return self._size - sum(rank < self._size for rank, _ in self._ends)

    def _name(self, rank: int) -> str:
        if rank in self._servers:
            return f"parameter server {rank - self._size}"
        return f"rank {rank}"

    def _grace(self) -> float:
        """How long the ranks that still run may take to end by themselves."""
        if self._frozen is not None:
            return _GRACE_AFTER_FREEZE_SECONDS
        if self.was_asked or self._signal == signal.SIGTERM:
            return self._save_seconds
        if any(code == USAGE for _, code in self._ends):
            return _GRACE_AFTER_USAGE_SECONDS
        if self._servers and self._running_ranks() == 0:
            return _GRACE_OF_SERVERS_SECONDS
        return _GRACE_SECONDS

    def _reap(self) -> None:
        known = {rank for rank, _ in self._ends}
        for rank, process in enumerate(self._ranks):
            code = process.code
            if rank in known or code is None:
                continue
            self._guard.forget(process.pid)
            process.kill()
            # What it printed last comes before what is said about it.
            for _ in range(16):
                if not self._pass_on(rank):
                    break
            if rest := self._unfinished[rank]:
                self._print(rank, [bytes(rest)])
                rest.clear()
            self._output.print(self._label(rank), self._last_words.end(rank, code))
            self._output.end(self._label(rank))
            self._ends.append((rank, code))
            is_ending = self._ended_here or self.was_told
            goes_on = self._servers and code not in (0, USAGE) and not is_ending
            if goes_on and rank < self._size and self._running_ranks():
                said = process.describe(code).replace("failed first", "failed")
                say("tfdist-run", f"rank {rank} {said}; the others go on.")

    def _look_for_frozen(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for rank, process in enumerate(self._ranks):
            if not process.is_stopped() or (self._servers and rank < self._size):
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, now)
            failed = self._has_failed()
            if self._frozen_seconds and now - since > self._frozen_seconds and not failed:
                self._frozen = rank if self._frozen is None else self._frozen

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Inside, signals go to the ranks, and the end of a rank wakes the loop that waits."""
        self._woken, waker = socket.socketpair()
        with self._woken, waker:
            self._woken.setblocking(False)
            waker.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            previous = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None)}
            for number in _FORWARDED:
                previous[number] = signal.signal(number, self._on_signal)
            if previous[signal.SIGHUP] == signal.SIG_IGN:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Under nohup.
            wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in previous.items():
                    signal.signal(number, handler)
                self._selector.close()

    def _on_signal(self, number: int, _) -> None:
        # Who presses Ctrl-C once more does not want to wait.
        self._is_urgent |= self.was_told and number == signal.SIGINT
        if not self._is_urgent:
            self._signal = number
            self._forward(number)

    def _forward(self, number: int) -> None:
        for process in self._ranks:
            if process.code is None:
                process.signal(number)

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._ranks) if process.code is None]

    def _end(self, number: int) -> None:
        """Ends the ranks that still run, by SIGTERM or by SIGKILL."""
        running = self._running()
        self._ended_here.update(running)
        stopped = [rank for rank in running if rank in self._stopped_since]
        if stopped and self._frozen is None and not self._own_failures():
            self._frozen = min(stopped, key=lambda rank: self._stopped_since[rank])
        for rank in running:
            # One that is stopped hears SIGKILL only.
            if number == signal.SIGKILL or rank in stopped:
                self._ranks[rank].kill()
        self._forward(number)

    # -- what it says -----------------------------------------------------------------------

    def _pass_on(self, rank: int) -> bool:
        """Passes on the lines in a chunk of a rank's output; returns whether there was any."""
        output = self._outputs.get(rank)
        if output is None:
            return False
        try:
            data = os.read(output.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(self._outputs.pop(rank))
            output.close()
            return False
        # A progress bar returns the carriage instead of feeding a line.
        first, *others = data.replace(b"\r", b"\n").split(b"\n")
        unfinished = self._unfinished[rank]
        unfinished += first
        if others:
            lines = [bytes(unfinished), *others[:-1]]
            unfinished[:] = others[-1]
            self._print(rank, lines)
        return True

    def _print(self, rank: int, lines: Sequence[bytes]) -> None:
        if self.was_told:
            lines = self._last_words.take(rank, lines)
        self._output.print(self._label(rank), lines)

    def _label(self, rank: int) -> bytes:
        return b"ps%d" % (rank - self._size) if rank in self._servers else b"%d" % rank

    def _write(self, data: bytes) -> None:
        text = memoryview(data)
        try:
            # Not through sys.stdout: under PYTHONUNBUFFERED it writes a part where a signal comes.
            while text:
                text = text[os.write(sys.stdout.fileno(), text) :]
        except BrokenPipeError:
            # Nobody reads on, as behind `| head`: the ranks end as if they had been told so.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            self._signal = self._signal or signal.SIGPIPE
            self._forward(signal.SIGTERM)

    def _own_failures(self) -> list[tuple[int, int]]:
        """The ranks that failed by themselves, in order, and their exit codes.

        A rank that the watchdog ended tells of another's trouble, one ended here of none.
        """
        return [
            (rank, code)
            for rank, code in self._ends
            if code not in (0, ENDED_BY_WATCHDOG) and rank not in self._ended_here
        ]

    def _decisive_failures(self) -> list[tuple[int, int]]:
        """What a job with servers does not get over: a server, a wrong setting, the chief."""
        own = self._own_failures()
        servers = [(rank, code) for rank, code in own if rank in self._servers]
        return servers + [(rank, code) for rank, code in own if rank == 0 or code == USAGE]

    def _conclude(self) -> int:
        failures = [(rank, code) for rank, code in self._ends if code]
        if failures and all(code == PREEMPTED for _, code in failures):
            say(
                "tfdist-run",
                "the ranks saved and ended after SIGTERM; start the job again to resume.",
            )
            return PREEMPTED
        if self._signal is not None:
            said = f"ended by {signal_name(self._signal)}"
            if self._is_urgent:
                said += ", and by a SIGINT after it that killed the ranks"
            kept = self._newest_checkpoint()
            where = "" if kept is None else f" The newest checkpoint is {kept}."
            say("tfdist-run", f"{said}; no rank is running any more.{where}")
            return 128 + self._signal
        if self._frozen is not None:
            say(
                "tfdist-run", f"{self._name(self._frozen)} was frozen (SIGSTOP); the job was ended."
            )
            codes = (code for _, code in self._own_failures() if code > 0)
            self.failed = self._frozen, next(codes, ENDED_BY_WATCHDOG)
            return self.failed[1]
        if not failures:
            return 0
        causes = self._decisive_failures() if self._servers else self._own_failures() or failures
        if not causes:
            return 0
        self.failed = rank, code = causes[0]
        said = self._ranks[rank].describe(code)
        say("tfdist-run", f"{self._name(rank)} {said}; the job was ended.")
        return 128 - code if code < 0 else code
