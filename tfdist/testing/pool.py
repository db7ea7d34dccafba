"""A pool of processes that run functions: one pool serves many tests, since start-up is slow."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import IO, cast

import cloudpickle

from tfdist.runtime import Listener
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG
from tfdist.runtime.orphan_guard import OrphanGuard
from tfdist.runtime.rendezvous import ENGINES, Endpoint, environments
from tfdist.runtime.shared_gpus import shares_gpus
from tfdist.testing.rank import PURPOSE, MakeEngine, free_address, make_engines_by
from tfdist.utils import checks
from tfdist.utils.errors import TfdistError

_STARTUP_SECONDS = 120.0
#: The time that other ranks have after one has failed: long enough to fail on their own.
_GRACE_SECONDS = 5.0
_STACK_SECONDS = 2.0
#: Larger numbers for one machine are probably a mistake.
_MOST_RANKS = 1024
_MOST_THREADS = 4096


class RankError(TfdistError):
    """A rank raised an error, died or did not respond in time.

    Attributes:
        rank: The rank.
        output: The last lines that the rank printed.
    """

    def __init__(self, message: str, rank: int, output: str = ""):
        super().__init__(
            message + (f"\n--- rank {rank} printed last ---\n{output}" if output else "")
        )
        self.rank = rank
        self.output = output


class RankPool:
    """N processes on this machine that are connected by an engine, and wait for functions.

    A function that raises on any rank, that kills its process, or that does not return in time,
    fails the call with that rank's traceback, and ends all processes; the next call starts new
    ones. No process outlives the pool.

    Args:
        num_ranks: The number of processes.
        engine: "horovod", "tensorflow" or "local"; or a function that makes an Engine, which is called on
            each rank as `engine(mesh, address)`. `mesh` is resolved: it has `mesh.rank` and `mesh.size`,
            and is passed to `Engine.__init__`. `address` is "127.0.0.1:PORT", the same on all ranks, on
            which no process listens yet. For another mesh it is called again, with another address. The
            function is sent by cloudpickle.
        threads: TensorFlow's intra-op threads of each rank.
        environment: Additional environment variables for all ranks.

    Raises:
        ValueError: `num_ranks` is not positive, or a value is not a string.
    """

    def __init__(
        self,
        num_ranks: int,
        engine: str | MakeEngine = "horovod",
        *,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ):
        self.num_ranks = checks.integer("num_ranks", num_ranks, minimum=1, maximum=_MOST_RANKS)
        self.engine = _check_engine(engine)
        self._threads = checks.integer("threads", threads, minimum=1, maximum=_MOST_THREADS)
        self._environment = _check_environment(environment)
        self._processes: list[subprocess.Popen] = []
        self._channels: list[connection.Connection] = []
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the live pool, by rank."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable, *args, timeout: float = 120.0, **kwargs) -> list:
        """Returns the results of `function(*args, **kwargs)` on the ranks, by rank.

        Raises:
            Exception: The error of the first failing rank, with its traceback in the notes.
            RankError: A rank died.
            TimeoutError: A rank did not return within `timeout` seconds; the message includes the
                Python stacks of all ranks.
        """
        checks.function("function", function)
        checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
        task = cloudpickle.dumps((function, args, kwargs))
        if not self._processes:
            self._start()
        try:
            return self._answers(task, timeout)
        except BaseException:
            # Ranks may still respond, as after Ctrl-C, and the next run would use these responses.
            self.close(kill=True)
            raise

    def _answers(self, task: bytes, timeout: float) -> list:
        results: dict[int, object] = {}
        failures: list[tuple[int, BaseException]] = []
        for rank, channel in enumerate(self._channels):
            try:
                channel.send_bytes(task)
            except OSError:
                failures.append((rank, self._death(rank)))
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.num_ranks:
            settled = results.keys() | {rank for rank, _ in failures}
            waiting = {c: r for r, c in enumerate(self._channels) if r not in settled}
            ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                if not failures:
                    failures.append(
                        (min(waiting.values()), self._timeout(waiting.values(), timeout))
                    )
                break
            for channel, rank in waiting.items():
                if channel not in ready:
                    continue
                try:
                    kind, payload = cloudpickle.loads(channel.recv_bytes())
                except (EOFError, OSError):
                    failures.append((rank, self._death(rank)))
                    continue
                if kind == "result":
                    results[rank] = payload
                else:
                    error, trace = payload
                    error.add_note(f"--- raised on rank {rank} ---\n{trace}")
                    failures.append((rank, error))
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            raise min(failures, key=self._is_later)[1]
        return [results[rank] for rank in range(self.num_ranks)]

    def _is_later(self, failure: tuple[int, BaseException]) -> tuple[bool, bool]:
        """Sorts failures: the death of a rank causes errors of others, and any failure ends by the watchdog."""
        rank, error = failure
        was_ended = self._processes[rank].poll() == ENDED_BY_WATCHDOG
        return was_ended, not isinstance(error, RankError)

    def close(self, *, kill: bool = False) -> None:
        """Ends all processes: first by closing their connections, then by SIGKILL."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.close()
        deadline = time.monotonic() + (0.0 if kill else 20.0)
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.05))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes, self._channels = [], []
        self._resources.close()

    def _start(self) -> None:
        if not callable(self.engine):
            self._start_processes(self.engine)
            return
        task = cloudpickle.dumps(
            (make_engines_by, (self.engine, self.num_ranks, free_address()), {})
        )
        self._start_processes("local")
        try:
            self._answers(task, _STARTUP_SECONDS)
        except BaseException:
            self.close(kill=True)
            raise

    def _start_processes(self, engine: str) -> None:
        self._resources = contextlib.ExitStack()
        self._logs = Path(
            self._resources.enter_context(
                tempfile.TemporaryDirectory(prefix="tfdist-ranks-", ignore_cleanup_errors=True)
            )
        )
        endpoints = [Endpoint()] * self.num_ranks
        variables = self._resources.enter_context(environments(engine, endpoints))
        guard = self._resources.enter_context(OrphanGuard())
        key = secrets.token_bytes(32)
        address = str(self._logs / "tasks")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(self.num_ranks)
        listener = self._resources.enter_context(
            Listener([listening], key, PURPOSE, identities=range(self.num_ranks))
        )
        for rank, environment in enumerate(variables):
            with open(self._log(rank), "wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "import sys; from tfdist.testing.rank import serve; serve(*sys.argv[1:])",
                        address,
                        str(rank),
                        engine,
                        str(self._threads),
                    ],
                    env={
                        **os.environ,
                        "TF_CPP_MIN_LOG_LEVEL": "2",
                        **({} if shares_gpus() else {"CUDA_VISIBLE_DEVICES": ""}),
                        "PYTHONUNBUFFERED": "1",
                        **self._environment,
                        **environment,
                    },
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            stdin = cast(IO[bytes], process.stdin)
            stdin.write(key.hex().encode() + b"\n")
            stdin.flush()
            self._processes.append(process)
            guard.watch(process.pid)
        channels: dict[int, connection.Connection] = {}
        deadline = time.monotonic() + _STARTUP_SECONDS
        try:
            while len(channels) < self.num_ranks:
                rank, sock = listener.accept(deadline)
                sock.setblocking(True)
                channels[rank] = connection.Connection(sock.detach())
        except TimeoutError:
            missing = sorted(set(range(self.num_ranks)) - channels.keys())
            output = self._tail(missing[0])
            self.close(kill=True)
            raise RankError(f"Ranks {missing} did not start.", missing[0], output) from None
        self._channels = [channels[rank] for rank in range(self.num_ranks)]

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank}.log"

    def _tail(self, rank: int, lines: int = 60) -> str:
        text = self._log(rank).read_text(errors="replace").splitlines()
        # A crash prints the stacks of all threads, in any order; that of the crashed one is shown.
        crash = [at for at, line in enumerate(text) if line.startswith("Current thread")]
        crash = crash or [at for at, line in enumerate(text) if "Fatal Python error" in line]
        first = crash[-1] if crash else max(len(text) - lines, 0)
        return "\n".join(text[first : first + lines])

    def _death(self, rank: int) -> RankError:
        code = self._processes[rank].wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return RankError(f"Rank {rank} ended, {how}.", rank, self._tail(rank))

    def _timeout(self, late, timeout: float) -> TimeoutError:
        late = sorted(late)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        stacks = "\n".join(f"--- rank {r} ---\n{self._tail(r)}" for r in range(self.num_ranks))
        return TimeoutError(f"Ranks {late} did not return within {timeout:g} s.\n{stacks}")


def _check_engine(engine: str | MakeEngine) -> str | MakeEngine:
    if not callable(engine) and not (isinstance(engine, str) and engine in ENGINES):
        names = ", ".join(map(repr, ENGINES))
        raise checks.refuse("engine", engine, f"one of {names}, or a function that makes an Engine")
    return engine


def _check_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    checks.instance("environment", environment, Mapping, "a dict of variables", optional=True)
    found = dict(environment or {})
    for name, value in found.items():
        fits = isinstance(name, str) and isinstance(value, str)
        if not fits or not name or "=" in name or "\0" in name + value:
            meaning = "a dict from names of variables to strings"
            raise checks.refuse("environment", environment, meaning)
    return found


def run_ranks(
    function: Callable,
    *args,
    num_ranks: int = 2,
    engine: str | MakeEngine = "horovod",
    timeout: float = 120.0,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    **kwargs,
) -> list:
    """Runs `function(*args, **kwargs)` on fresh ranks, and returns the results by rank.

    It has the arguments of `RankPool` and of `RankPool.run`, and raises the same errors.
    """
    checks.function("function", function)
    checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
    with RankPool(num_ranks, engine, threads=threads, environment=environment) as pool:
        return pool.run(function, *args, timeout=timeout, **kwargs)
