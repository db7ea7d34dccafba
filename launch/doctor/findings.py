"""Findings of checks, and the concurrent execution of checks with a time limit."""

from __future__ import annotations

import dataclasses
import enum
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.sessions import kill_session


class State(enum.Enum):
    """The severity of a finding; a note is information that does not prevent training."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the page.

    Attributes:
        state: Severity.
        what: Subject of the check, in one or two words.
        text: Result of the check.
        remedy: Remedy; empty if nothing has to be done.
    """

    state: State
    what: str
    text: str
    remedy: str = ""


def ok(what: str, text: str) -> Finding:
    """Create a finding without a problem."""
    return Finding(State.OK, what, text)


def note(what: str, text: str, remedy: str = "") -> Finding:
    """Create a finding with information that does not prevent training."""
    return Finding(State.NOTE, what, text, remedy)


def problem(what: str, text: str, remedy: str) -> Finding:
    """Create a finding that prevents training, with its remedy."""
    return Finding(State.PROBLEM, what, text, remedy)


Check = Callable[[], list[Finding]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: its title, and the findings in the order of the checks."""

    title: str
    findings: tuple[Finding, ...]


def run_checks(checks: Mapping[str, Sequence[tuple[str, Check]]], seconds: float) -> list[Section]:
    """Run all checks concurrently in threads, with a common time limit.

    An unresponsive name server or file system blocks a thread in the kernel; such a thread is abandoned,
    and its check is reported as not answering.

    Args:
        checks: The checks of each section by its title, each with the name of its subject.
        seconds: Time limit of all checks together.

    Returns:
        The sections in their order.
    """
    deadline = time.monotonic() + seconds
    running = {
        title: [(what, _Running(check)) for what, check in some] for title, some in checks.items()
    }
    return [
        Section(
            title,
            tuple(
                finding
                for what, each in some
                for finding in each.findings(what, seconds, deadline - time.monotonic())
            ),
        )
        for title, some in running.items()
    ]


class _Running:
    """A check that runs in a thread."""

    def __init__(self, check: Check):
        self._check = check
        self._found: list[Finding] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._check()
        except Exception as error:
            self._error = error

    def findings(self, what: str, limit: float, left: float) -> list[Finding]:
        """Wait at most `left` seconds, and return the findings."""
        self._thread.join(max(left, 0.0))
        if self._error is not None:
            return [
                problem(
                    what,
                    f"this check failed: {type(self._error).__name__}: {self._error}",
                    "Report it as a bug of tfdist, with this page.",
                )
            ]
        if self._found is None:
            return [
                problem(
                    what,
                    f"no answer within {limit:g} s",
                    "Check the name server, the file system and the driver, or increase --seconds.",
                )
            ]
        return self._found


def answer_of(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a command, and return its exit code, stdout and stderr.

    The code is None if the command did not end within `seconds`; it is then killed, with its children.

    Raises:
        OSError: The command does not exist.
    """
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            output, errors = process.communicate()
            return None, output, errors
        finally:
            kill_session(process.pid)
    return process.returncode, output, errors


def ended_by(code: int) -> str:
    """A description of how a process ended."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"
