"""Jobs of a benchmark: ranks of a program in peers/, which wait between the blocks of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.comparisons import Job
from benchmarks.environments import MADE
from benchmarks.job_variables import RESTLESS, outside, variables
from tfdist.runtime.orphan_guard import OrphanGuard
from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

_START = Path(__file__).parent / "peers" / "start.py"
_LEAVE_SECONDS = 3.0
#: How Python ends a traceback.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")


class JobError(TfdistError):
    """A job cannot run, or has ended or hung: one line says which and how."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Some steps of a job.

    Attributes:
        seconds: The median time of a step, on the slowest rank.
        processor: The processor time of a step, on the rank that uses most.
        loss: The mean loss over ranks and steps; None where nothing is trained.
        peak: The most bytes that a rank's process has had so far.
    """

    seconds: float
    processor: float
    loss: float | None
    peak: int


class RunningJob:
    """A job whose ranks live until the context ends; they wait while no block is asked for.

    Args:
        job: What to run.
        model: Which model.
        sizes: Of the model.
        peers: The folder of the environments that `make peers` makes.
        timeout: How long the start, or a block, may take in seconds.

    Attributes:
        parameters: How many the model has, over all ranks, without adapters.
        trained: How many are trained.
        imported: The bytes that a rank's process had before it built anything; the most of all.
        packages: The files of the `tfdist` that ranks have imported; None for those without it.

    Raises:
        JobError: The environment is not there, or a rank ended or did not answer.
    """

    def __init__(
        self, job: Job, model: str, sizes: Mapping[str, int], peers: Path, timeout: float = 300.0
    ):
        self._job, self._model, self._sizes = job, model, sizes
        self._python = interpreter(job, peers)
        self._timeout = timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._resources = contextlib.ExitStack()
        self.parameters = self.trained = self.imported = 0
        self.packages: set[str | None] = set()

    def __enter__(self) -> RunningJob:
        try:
            self._start()
            ready = self._answers()
        except BaseException:
            self.__exit__()
            raise
        self.parameters = max(answer["parameters"] for answer in ready)
        self.trained = max(answer["trained"] for answer in ready)
        self.imported = max(answer["imported"] for answer in ready)
        self.packages = {answer["tfdist"] for answer in ready}
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            with contextlib.suppress(OSError):
                cast(IO[bytes], process.stdin).close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            cast(IO[bytes], process.stdout).close()
        self._processes = []
        self._resources.close()

    def block(self, steps: int) -> Block:
        """Trains some steps more.

        Raises:
            JobError: A rank ended or did not answer.
        """
        self._signal(signal.SIGCONT)
        for rank, process in enumerate(self._processes):
            stdin = cast(IO[bytes], process.stdin)
            try:
                stdin.write(f"{steps}\n".encode())
                stdin.flush()
            except OSError:
                raise self._death(rank) from None
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        losses = [answer["loss"] for answer in answers if answer["loss"] is not None]
        return Block(
            max(answer["seconds"] for answer in answers),
            max(answer["processor"] for answer in answers),
            statistics.mean(losses) if losses else None,
            max(answer["peak"] for answer in answers),
        )

    def _start(self) -> None:
        folder = self._resources.enter_context(
            tempfile.TemporaryDirectory(prefix="tfdist-bench-", ignore_cleanup_errors=True)
        )
        guard = self._resources.enter_context(OrphanGuard())
        self._logs = [Path(folder) / f"rank{rank}" for rank in range(self._job.ranks)]
        for rank, environment in enumerate(self._resources.enter_context(variables(self._job))):
            settings = {
                "program": self._job.program,
                "model": self._model,
                "sizes": self._sizes,
                "rank": rank,
                "ranks": self._job.ranks,
                "threads": self._job.threads,
                "options": self._job.options,
                "without": self._job.without,
            }
            with open(self._logs[rank], "wb") as log:
                process = subprocess.Popen(
                    [self._python, "-P", str(_START), json.dumps(settings)],
                    env={**outside(), **environment, **self._job.variables},
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            guard.watch(process.pid)
            self._processes.append(process)

    def _signal(self, number: signal.Signals) -> None:
        """Holds ranks still, or lets them go on, whose waiting would cost the other job time."""
        if self._job.meeting in RESTLESS:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _answers(self) -> list[dict[str, Any]]:
        """A line of each rank."""
        lines = [b""] * len(self._processes)
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(cast(IO[bytes], process.stdout), selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    late = sorted(key.data for key in selector.get_map().values())
                    raise JobError(
                        f"Ranks {late} of {self._job.title} did not respond within {self._timeout:g} s."
                    )
                for key, _ in ready:
                    read = os.read(key.fd, 1 << 16)
                    if not read:
                        raise self._death(key.data)
                    lines[key.data] += read
                    if read.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def _death(self, rank: int) -> JobError:
        try:
            code = self._processes[rank].wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            how = "failed"  # What it started still holds it up.
        else:
            how = f"exited with {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        lines = self._logs[rank].read_text(errors="replace").strip().splitlines()
        # Below the error its threads and libraries may still have their say.
        errors = [line for line in lines if _ERROR.match(line)] or lines
        said = f": {one_line(errors[-1])}" if errors else ""
        return JobError(f"{self._job.title}: rank {rank} {how}{said}")


def interpreter(job: Job, peers: Path) -> str:
    """The Python that a job runs in.

    Raises:
        JobError: Its environment was not made.
    """
    if job.environment is None:
        return sys.executable
    python = peers / job.environment / "bin" / "python"
    if not (peers / job.environment / MADE).exists():
        raise JobError(
            f"The environment of {job.title} is missing in {peers / job.environment}. Run `make peers`."
        )
    return str(python.absolute())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
