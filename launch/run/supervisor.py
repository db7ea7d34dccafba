"""Supervision of the ranks of a job: start, output and end."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from tfdist.launch.flags.command import say
from tfdist.launch.run.interruption import LastWords
from tfdist.launch.run.output import RankOutput
from tfdist.launch.run.processes import RankProcess, signal_name
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG, PREEMPTED, USAGE
from tfdist.runtime.orphan_guard import OrphanGuard

#: How long ranks may run after one has failed: the watchdog's diagnosis takes a few seconds, and
#: is worth more than a quick end.
_GRACE_SECONDS = 8.0
#: If a rank is frozen, the watchdog's timeout has expired already.
_GRACE_AFTER_FREEZE_SECONDS = 4.0
#: The failed rank reports a wrong setting, which the others have too.
_GRACE_AFTER_USAGE_SECONDS = 0.5
#: Servers end after all ranks have disconnected, which a killed rank does not do.
_GRACE_OF_SERVERS_SECONDS = 1.5
_TERMINATE_SECONDS = 3.0
_LOOK_SECONDS = 0.2
#: Bytes per read, so that a rank with endless output does not starve the others; the size of a Linux
#: pipe.
_CHUNK = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Supervisor:
    """The supervisor of the processes of a job.

    Output is forwarded line by line with the prefix `[rank]`. The job ends when all ranks have ended;
    after the first failure the others have a few seconds to report, and are then ended by SIGTERM and
    SIGKILL.

    Args:
        starts: Functions that start the ranks, followed by those that start the parameter servers.
        servers: Number of parameter servers. With servers, the failure of a rank does not end the job,
            but the end of a server before the ranks does.
        frozen_seconds: Seconds that a rank may be stopped (SIGSTOP) before it counts as failed; 0 for
            no limit.
        save_seconds: Seconds for ranks to save after a SIGTERM.
        has_gpu: Whether ranks may have GPUs, so that CUDA's startup errors are shown.
        should_end: Called periodically; the ranks get a SIGTERM once it returns True.
        newest_checkpoint: Returns the newest saved checkpoint, or None if none is known.
        first_rank: The rank of the first process.

    Attributes:
        was_asked: Whether `should_end` returned True.
        failed: The rank that made the job fail, and its exit code; None without a failure.
        failed_at: The time at which the job began to end, in seconds since the epoch; None before.
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
        first_rank: int = 0,
    ):
        self._first_rank = first_rank
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
        """Run the job and return its exit code: that of the rank that failed first, or 0.

        The code of a rank that was killed by a signal is 128 plus the signal's number, as in a shell.

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
        """Whether the job was ended by a signal to this process."""
        return self._signal is not None

    def _start(self, rank: int, process: RankProcess) -> None:
        self._ranks.append(process)
        self._guard.watch(process.pid)
        if self._signal is not None:
            self._forward(self._signal)  # The signal arrived while the rank was started.
        self._outputs[rank] = process.output
        self._unfinished[rank] = bytearray()
        self._selector.register(process.output, selectors.EVENT_READ, rank)

    # -- Supervision ------------------------------------------------------------------------

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
                self._end(signal.SIGKILL)  # All remaining ranks are frozen.
            while steps and time.monotonic() - ending_since > steps[0][0]:
                self._end(steps.pop(0)[1])

    def _has_failed(self) -> bool:
        """Whether a process has failed that the job requires."""
        if not self._servers:
            return any(code for _, code in self._ends)
        ended = dict(self._ends)
        if self._running_ranks() == 0:
            return ended.get(0, 0) != 0
        return any(
            code == USAGE or (rank in self._servers and code != 0) for rank, code in self._ends
        )

    def _running_ranks(self) -> int:
        """The number of running ranks, without servers."""
        return self._size - sum(rank < self._size for rank, _ in self._ends)

    def _name(self, rank: int) -> str:
        if rank in self._servers:
            return f"parameter server {rank - self._size}"
        return f"rank {self._first_rank + rank}"

    def _grace(self) -> float:
        """Seconds for the remaining ranks to end without a signal."""
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
            # Forward the remaining output before the message about the end of the rank.
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
                say("tfdist-run", f"{self._name(rank)} {said}; the others continue.")

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
        """Forward signals to the ranks, and wake the supervision loop when a rank ends."""
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
        # A second Ctrl-C skips the waiting time.
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
        """End the running ranks by SIGTERM or SIGKILL."""
        running = self._running()
        self._ended_here.update(running)
        stopped = [rank for rank in running if rank in self._stopped_since]
        if stopped and self._frozen is None and not self._own_failures():
            self._frozen = min(stopped, key=lambda rank: self._stopped_since[rank])
        for rank in running:
            # A stopped process handles only SIGKILL.
            if number == signal.SIGKILL or rank in stopped:
                self._ranks[rank].kill()
        self._forward(number)

    # -- Output -----------------------------------------------------------------------------

    def _pass_on(self, rank: int) -> bool:
        """Forward the lines in a chunk of a rank's output; return whether there was any."""
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
        # Progress bars end lines with a carriage return.
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
        return (
            b"ps%d" % (rank - self._size)
            if rank in self._servers
            else b"%d" % (self._first_rank + rank)
        )

    def _write(self, data: bytes) -> None:
        text = memoryview(data)
        try:
            # sys.stdout may write only a part if a signal arrives under PYTHONUNBUFFERED.
            while text:
                try:
                    text = text[os.write(sys.stdout.fileno(), text) :]
                except BlockingIOError:
                    # Another program has changed the terminal that both have.
                    select.select([], [sys.stdout], [], 1.0)
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                # Such as a full disk: the job is worth more than its output.
                with contextlib.suppress(OSError):
                    reason = f"the output cannot be written ({error.strerror})"
                    print(f"tfdist-run: {reason}; the job continues without it.", file=sys.stderr)
                return
            # The reader has exited, as `| head` does: end the ranks as if by a signal.
            self._signal = self._signal or signal.SIGPIPE
            self._forward(signal.SIGTERM)

    def _own_failures(self) -> list[tuple[int, int]]:
        """The ranks that failed on their own, in order, with their exit codes.

        Ranks ended by the watchdog or by this supervisor are consequences of another failure.
        """
        return [
            (rank, code)
            for rank, code in self._ends
            if code not in (0, ENDED_BY_WATCHDOG) and rank not in self._ended_here
        ]

    def _decisive_failures(self) -> list[tuple[int, int]]:
        """The failures that end a job with servers: of a server, a wrong setting, or the chief."""
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
