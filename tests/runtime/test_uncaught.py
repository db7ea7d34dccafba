"""Which exception ends a process, as its `atexit` and its threads see it, whatever the hook does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from tfdist.checkpoint.errors import CheckpointError
from tfdist.runtime import uncaught

def tell():
    print(repr(uncaught.uncaught()))

def tell_soon():
    threading.main_thread().join()
    tell()

atexit.register(tell)
{body}
"""


def told(body: str, *, module: bool = False, folder=None) -> tuple[str, int]:
    """What the program sees of its end, and its exit code."""
    text = PROGRAM.format(body=body)
    if module:
        (folder / "program.py").write_text(text)
    arguments = ["-m", "program"] if module else ["-c", text]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=folder
    )
    return done.stdout.strip(), done.returncode


@pytest.mark.parametrize(
    ("body", "code", "seen"),
    [
        ("pass", 0, "None"),
        ("sys.exit(3)", 3, "None"),
        ("sys.exit('words')", 1, "None"),
        # Python ends by the signal itself, so that a shell sees it.
        ("raise KeyboardInterrupt", -signal.SIGINT, "None"),
        ("1 / 0", 1, "ZeroDivisionError('division by zero')"),
        ("sys.excepthook = lambda *_: None; raise ValueError('a')", 1, "ValueError('a')"),
        ("sys.excepthook = lambda *_: sys.exit(2); raise ValueError('a')", 2, "ValueError('a')"),
        ("sys.last_value = ValueError('of a shell')", 0, "None"),
        ("uncaught.ends_by(ValueError('shown'))\nsys.exit(2)", 2, "ValueError('shown')"),
        ("uncaught.leave_out(CheckpointError); raise CheckpointError('full')", 1, "None"),
    ],
)
def test_what_ended_the_process(body, code, seen):
    assert told(body) == (seen, code)


def test_a_program_that_runs_as_a_module(tmp_path):
    assert told("raise ValueError('a')", module=True, folder=tmp_path) == ("ValueError('a')", 1)


def test_a_thread_sees_it_while_the_process_waits_for_it():
    body = "threading.Thread(target=tell_soon).start(); raise ValueError('a')"
    assert told(body) == ("ValueError('a')\nValueError('a')", 1)


def test_an_exception_that_a_runner_caught_is_not_the_end():
    body = (
        "def work(): raise ValueError('a')\n"
        "import concurrent.futures as futures\n"
        "with futures.ThreadPoolExecutor() as pool: error = pool.submit(work).exception()\n"
        "sys.last_value = error"
    )
    assert told(body) == ("None", 0)
