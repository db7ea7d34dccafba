"""What a check has found, and checks that run beside each other and cannot hold up the page."""

from __future__ import annotations

import dataclasses
import enum
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.runtime.sessions import kill_session


class State(enum.Enum):
    """How bad a finding is: a note says what is missing or worth knowing, and all works without."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the page.

    Attributes:
        state: How bad it is.
        what: What was looked at, in a word or two.
        text: What was found.
        remedy: What to do about it; empty where nothing is to be done.
    """

    state: State
    what: str
    text: str
    remedy: str = ""


def ok(what: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding(State.OK, what, text)


def note(what: str, text: str, remedy: str = "") -> Finding:
    """Something worth knowing, which keeps nothing from working."""
    return Finding(State.NOTE, what, text, remedy)


def problem(what: str, text: str, remedy: str) -> Finding:
    """Something that keeps a training from working, and its remedy."""
    return Finding(State.PROBLEM, what, text, remedy)


Check = Callable[[], list[Finding]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: its title, and what was found, in the order of the checks."""

    title: str
    findings: tuple[Finding, ...]


def run_checks(checks: Mapping[str, Sequence[tuple[str, Check]]], seconds: float) -> list[Section]:
    """Runs all checks at the same time, each in a thread, and waits for none beyond a time limit.

    A name server that does not answer, or a file system that hangs, holds a thread in the kernel:
    the thread is left behind, and its check is reported as one that did not answer.

    Args:
        checks: By the title of a section, its checks; each with the name of what it looks at.
        seconds: How long all of them may take together.

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
    """A check under way in a thread."""

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
        """What was found; waits for so many seconds."""
        self._thread.join(max(left, 0.0))
        if self._error is not None:
            return [
                problem(
                    what,
                    f"this check failed: {type(self._error).__name__}: {self._error}",
                    "Report it, with this page, where tfdist's bugs are reported.",
                )
            ]
        if self._found is None:
            return [
                problem(
                    what,
                    f"no answer within {limit:g} s",
                    "Look at what hangs (name server, file system, driver), or give it more time "
                    "with --seconds.",
                )
            ]
        return self._found


def answer_of(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs a command and returns its exit code and what it printed on stdout and on stderr.

    The code is None where it did not end within `seconds`; it is then killed, with its children.

    Raises:
        OSError: There is no such command.
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
    """How a process ended, in words."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"
