"""How a program of the command line ends: by one line and a code, or by a traceback that is needed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.launch.jobs import heed_signals

PROGRAM = """
import errno, os, sys
from absl import flags
from tfdist.launch.flags import command

def main(checked):
    {body}

command.Program(main, flags.FlagValues(), usage="program [flags]", summary="Tries.").run()
"""


def run(body: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=heed_signals,
        **options,
    )


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise command.UsageError('no such thing')", 2, "program: no such thing"),
        ("raise command.Failure('it broke')", 1, "program: it broke"),
        ("open('/no/such/file')", 1, "No such file or directory: '/no/such/file'"),
        ("os.write(os.open('/dev/full', os.O_WRONLY), b'a')", 1, "No space left on device"),
        ("raise OSError(errno.EROFS, os.strerror(errno.EROFS))", 1, "Read-only file system"),
        ("raise command.UsageError('two\\nlines')", 2, "program: two lines"),
    ],
)
def test_what_can_be_expected_is_told_in_one_line(body, code, words):
    done = run(body)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('a mistake')", "raise OSError('of no file')", "1 / 0"]
)
def test_a_mistake_of_the_program_keeps_its_traceback(body):
    done = run(body)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_ctrl_c_needs_no_words():
    done = run("os.kill(os.getpid(), 2)")
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""


def test_a_reader_that_has_gone_is_no_failure():
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    with reader.stdin as writing:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(body="print('a' * 100_000, flush=True)")],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_a_hook_before_the_programs_own_hears_of_the_failure():
    hook = "sys.excepthook = lambda *_: print('heard', file=sys.stderr)"
    done = run(f"{hook}; raise command.UsageError('no such thing')")
    assert done.returncode == 2
    assert done.stderr == "heard\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--flagfile="], "--flagfile must be the path of a file. Received: --flagfile=''."),
        (["--flagfile", ""], "--flagfile must be the path of a file. Received: --flagfile=''."),
        (["--flagfile=/no/such"], "/no/such"),
        (["--flagfile=bytes"], "--flagfile"),
        (["--no-such-flag"], "no-such-flag"),
        (["word"], "Positional arguments are not supported"),
    ],
)
def test_flags_of_all_programs(arguments, words, tmp_path):
    (tmp_path / "bytes").write_bytes(b"--name=\xff\xfe\n")
    done = run("print('no')", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
