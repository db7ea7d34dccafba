"""Ranks on this machine as one job: started together, heard together, ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from tfdist.exit_codes import ENDED_BY_WATCHDOG

__all__ = ["Supervisor"]

#: How long ranks may go on after one has failed: the watchdog's verdict takes a few seconds, and
#: its words are worth more than a quick end.
_GRACE_SECONDS = 10.0
_TERMINATE_SECONDS = 5.0


class Supervisor:
    """Runs one command on each of several ranks, and answers for all of them.

    Each rank is a session of its own, so that its children end with it. Output is passed on line
    by line behind `[rank]`. The job ends when every rank has ended; when one fails the others get
    a few seconds to say why and are then ended too, by SIGTERM and by SIGKILL.

    Args:
        command: The command and its arguments.
        environments: What each rank's environment has beside this process's.
        frozen_seconds: How long a rank may be stopped (SIGSTOP) before it counts as failed; 0 for
            any time.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        frozen_seconds: float,
    ):
        self._command = list(command)
        self._environments = environments
        self._frozen_seconds = frozen_seconds
        self._ranks: list[subprocess.Popen] = []
        self._buffers: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._stopped_since: dict[int, float] = {}
        self._ends: list[tuple[int, int]] = []
        self._frozen: int | None = None
        self._signal: int | None = None

    def run(self) -> int:
        """Runs the job and returns its exit code: that of the rank that failed first, or 0.

        A rank that a signal killed counts as 128 plus the signal's number, as in a shell.
        """
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            for rank, environment in enumerate(self._environments):
                self._start(rank, environment)
            self._watch()
        finally:
            self._kill_all(signal.SIGKILL)
            for process in self._ranks:
                process.wait()
            self._drain()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._conclude()

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            self._command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ranks.append(process)
        self._buffers[rank] = b""
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]

    def _watch(self) -> None:
        ending_since: float | None = None
        while len(self._ends) < len(self._ranks):
            for key, _ in self._selector.select(0.2):
                self._pass_on(key.data)
            self._reap()
            self._look_for_frozen()
            failed = any(code for _, code in self._ends)
            if not failed and self._signal is None and self._frozen is None:
                continue
            if ending_since is None:
                ending_since = time.monotonic()
            waited = time.monotonic() - ending_since
            if waited > _GRACE_SECONDS + _TERMINATE_SECONDS:
                self._kill_all(signal.SIGKILL)
            elif waited > _GRACE_SECONDS:
                self._kill_all(signal.SIGTERM)

    def _reap(self) -> None:
        known = {rank for rank, _ in self._ends}
        for rank, process in enumerate(self._ranks):
            if rank not in known and process.poll() is not None:
                # What it printed last comes before what is said about it.
                self._pass_on(rank)
                self._ends.append((rank, process.returncode))

    def _look_for_frozen(self) -> None:
        now = time.monotonic()
        for rank, process in enumerate(self._ranks):
            stopped = False
            if process.returncode is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            if not stopped:
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, now)
            if self._frozen_seconds and now - since > self._frozen_seconds:
                self._frozen = rank if self._frozen is None else self._frozen

    def _on_signal(self, number, _) -> None:
        self._signal = number
        self._kill_all(number)

    def _kill_all(self, number: int) -> None:
        for process in self._ranks:
            # The whole session: a rank's own children too, also after it has ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _pass_on(self, rank: int, final: bool = False) -> None:
        stream = self._ranks[rank].stdout
        with contextlib.suppress(BlockingIOError, ValueError):
            while data := os.read(stream.fileno(), 1 << 16):  # type: ignore[union-attr]
                self._buffers[rank] += data
            if stream in {key.fileobj for key in self._selector.get_map().values()}:
                self._selector.unregister(stream)  # type: ignore[arg-type]
        # A progress bar returns the carriage instead of feeding a line.
        *lines, rest = self._buffers[rank].replace(b"\r", b"\n").split(b"\n")
        if final and rest:
            lines, rest = [*lines, rest], b""
        self._buffers[rank] = rest
        for line in lines:
            if line.strip(b"\x08 "):
                print(f"[{rank}] {line.decode(errors='replace').strip(chr(8))}", flush=True)

    def _drain(self) -> None:
        for rank in range(len(self._ranks)):
            self._pass_on(rank, final=True)

    def _conclude(self) -> int:
        failures = [(rank, code) for rank, code in self._ends if code]
        if self._signal is not None:
            self._say(f"ended by {signal.Signals(self._signal).name}.")
            return 128 + self._signal
        if not failures and self._frozen is None:
            return 0
        # A rank that the watchdog ended tells of another's trouble.
        own = [(rank, code) for rank, code in failures if code != ENDED_BY_WATCHDOG]
        frozen = self._frozen
        if frozen is None and self._stopped_since:
            frozen = min(self._stopped_since, key=lambda rank: self._stopped_since[rank])
        if frozen is not None:
            self._say(f"rank {frozen} was frozen (SIGSTOP); the job was ended.")
            return next((code for _, code in failures if code > 0), ENDED_BY_WATCHDOG)
        rank, code = (own or failures)[0]
        if code < 0:
            self._say(f"rank {rank} was killed by {signal.Signals(-code).name}; the job was ended.")
            return 128 - code
        self._say(f"rank {rank} failed first, with exit code {code}; the job was ended.")
        return code

    def _say(self, text: str) -> None:
        print(f"tfdist-run: {text}", file=sys.stderr, flush=True)
