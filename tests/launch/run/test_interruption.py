"""Ctrl-C and SIGTERM: one line of the launcher, no tracebacks of ranks, and what the program prints stays."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.conftest import skip_without
from tests.launch.jobs import (
    PYTHON,
    TIMEOUT,
    TWO,
    assert_said,
    by_rank,
    finish,
    heed_signals,
    wait_for,
)
from tfdist.checkpoint import latest
from tfdist.launch.run.interruption import LastWords
from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG

SCRIPT = Path(__file__).with_name("interrupted_script.py")
ENDED = "ended by SIGINT; no rank is running any more."

HEAD = "Traceback (most recent call last):"
FRAMES = ['  File "a.py", line 3, in <module>', "    f()", "    ^^^"]
INTERRUPT = [HEAD, *FRAMES, "KeyboardInterrupt"]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]
ABORTED = [
    HEAD,
    *FRAMES,
    "tensorflow.python.framework.errors_impl.AbortedError: Graph execution error:",
    "",
    "Detected at node TfdistReceive defined at (most recent call last):",
    "<stack traces unavailable>",
    "The connection to rank 1 has ended.",
    "\t [[{{node TfdistReceive}}]] [Op:__inference_one_step_on_data_1004]",
]
REPLACED = [
    HEAD,
    *FRAMES,
    "RuntimeError: pybind11::error_already_set: MISMATCH of original and normalized active exception "
    "types: ORIGINAL AbortedError REPLACED BY KeyboardInterrupt: <EMPTY MESSAGE>",
    "",
    "At:",
    "  /a/errors_impl.py(412): __init__",
]
NUMPY = [
    "KeyboardInterrupt",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    HEAD,
    *FRAMES,
    "ImportError: ",
    "",
    "Importing the numpy C-extensions failed. This error can happen for",
    "many reasons, often due to issues with your setup.",
    "",
    'Original error was: PyCapsule_Import could not import module "datetime"',
]
CAPSULE = [HEAD, *FRAMES, 'ImportError: PyCapsule_Import could not import module "datetime"']
MISSING = [
    *CAPSULE[:-1],
    *NUMPY[NUMPY.index("ImportError: ") : -1],
    "Original error was: libblas.so.3: cannot open shared object file",
]
VERDICT = [
    "tfdist watchdog on rank 0: Rank 1 ended while rank 0 waits in all_reduce/a (call 29).",
    "This rank waits in all_reduce/a (call 29). Ending this rank.",
]
WARNING = [
    "W0000 00:00:1795860543.277013   10393 local_rendezvous.cc:412] Local rendezvous is aborting",
    "\t [[{{node TfdistReceive}}]]",
]
HOROVOD = (
    "[2026-11-28 10:21:28.769047: E /a/horovod/common/operations.cc:697] [0]: Horovod background"
)
REAL = [HEAD, *FRAMES, "ValueError: of the program's own", "in two lines"]
_FAILED = 1


def shown(lines, code):
    """What is printed of a rank, whatever its chunks are."""
    found = set()
    for size in (1, 2, 3, len(lines)):
        words, printed = LastWords(), []
        for begin in range(0, len(lines), size):
            printed += words.take(0, [line.encode() for line in lines[begin : begin + size]])
        printed += words.end(0, code)
        found.add(tuple(line.decode() for line in printed))
    assert len(found) == 1
    return list(found.pop())


@pytest.mark.parametrize("code", [-signal.SIGINT, -signal.SIGTERM, 0, 9, ENDED_BY_WATCHDOG])
@pytest.mark.parametrize(
    "lines",
    [
        INTERRUPT,
        [*INTERRUPT[:-1], "", "KeyboardInterrupt"],  # With nothing to underline.
        [*INTERRUPT[:-1], "KeyboardInterrupt: told"],
        [*ABORTED, *DURING, *INTERRUPT],
        [*REAL[:-1], *DURING, *INTERRUPT],
        REPLACED,
        [HEAD, *FRAMES, *NUMPY],
        CAPSULE,
        WARNING,
        [HOROVOD],
        VERDICT,
        [*WARNING, *INTERRUPT, HOROVOD, *VERDICT],
        ["Exception ignored in: <function f at 0x7f>", *INTERRUPT],
        ["Process ForkPoolWorker-1:", *INTERRUPT],
    ],
    ids=lambda value: None if isinstance(value, int) else value[-1][:20],
)
def test_what_only_tells_of_the_interruption_is_left_out(lines, code):
    around = ["before", "  with a blank"], ["after", "I0000 is the program's"]
    assert shown([*around[0], *lines, *around[1]], code) == [*around[0], *around[1]]


@pytest.mark.parametrize(
    "lines",
    [
        REAL,
        MISSING,
        [*INTERRUPT, *DURING, *REAL],
        [HEAD, *FRAMES, "", "ZeroDivisionError: by zero"],
    ],
)
def test_another_error_is_shown(lines):
    assert shown(["before", *lines, "after"], _FAILED) == ["before", *lines, "after"]
    assert shown([*INTERRUPT, *lines, *VERDICT], _FAILED) == lines


def test_an_error_upon_another_ranks_end_is_left_out():
    assert shown([*ABORTED, "mine", *VERDICT], ENDED_BY_WATCHDOG) == ["mine"]
    assert shown(ABORTED, _FAILED) == ABORTED


def test_what_was_cut_is_left_out():
    assert shown(["before", *INTERRUPT[:3]], -signal.SIGKILL) == ["before"]


def test_ranks_are_apart():
    words = LastWords()
    assert words.take(0, [b"a", HEAD.encode()]) == [b"a"]
    assert words.take(1, [b"b"]) == [b"b"] and words.take(0, [b"c"]) == []
    assert words.end(1, 0) == []


# Programs of Python alone.

_RANK = """
import sys, time
try:
    print("up", flush=True)
    time.sleep(1000)
finally:
    print("cleaned up", flush=True)
    {more}
"""


@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher", "group"])
def test_ctrl_c_is_one_line(jobs, whole_group):
    job = jobs.start(*TWO, *PYTHON, _RANK.format(more=""))
    said = wait_for(job, "[0] up", "[1] up")
    (os.killpg if whole_group else os.kill)(job.pid, signal.SIGINT)
    finished = finish(job, said)
    assert_said(finished, 130, ENDED)
    assert sorted(finished.stdout.splitlines()[2:]) == ["[0] cleaned up", "[1] cleaned up"]


def test_the_error_of_a_clean_up_is_shown(jobs):
    job = jobs.start(*TWO, *PYTHON, _RANK.format(more="raise ValueError('mine')"))
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    finished = finish(job, said)
    assert_said(finished, 130, ENDED)
    for rank in (0, 1):
        assert f"[{rank}] KeyboardInterrupt" in finished.stdout
        assert f"[{rank}] ValueError: mine" in finished.stdout


def test_a_traceback_before_ctrl_c_is_shown(jobs):
    script = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    finished = jobs.run(*TWO, *PYTHON, script)
    assert finished.returncode == 130 and "[0] KeyboardInterrupt" in finished.stdout


def test_the_second_ctrl_c_kills(jobs):
    script = "trap 'echo told' INT TERM; echo up; while :; do sleep 0.1; done"
    job = jobs.start(*TWO, "sh", "-c", script)
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    said += wait_for(job, "[0] told", "[1] told")
    job.send_signal(signal.SIGINT)
    finished = finish(job, said)
    # Neither a second SIGINT nor a SIGTERM came before the end.
    assert finished.stdout.count("told") == 2
    killed = "ended by SIGINT, and by a SIGINT after it that killed the ranks; "
    assert_said(finished, 130, f"{killed}no rank is running any more.")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_newest_checkpoint_is_named(jobs, number, code):
    save = 'printf /data/step-7 > "$TFDIST_NEWEST_CHECKPOINT"; echo up; exec sleep 1000'
    job = jobs.start(*TWO, *by_rank(save, "echo up; exec sleep 1000"))
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(number)
    ended = f"ended by {number.name}; no rank is running any more."
    assert_said(finish(job, said), code, f"{ended} The newest checkpoint is /data/step-7.")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_a_restart_is_one_line(jobs, number, code):
    flags = ("-np=2", "--engine=tensorflow", "--max_restarts=9", "--", *by_rank("true", "exit 3"))
    job = jobs.start(*flags, stderr=subprocess.STDOUT)
    wait_for(job, "tfdist-run: restart 1 of 9 in 1 s.")
    job.send_signal(number)
    said, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == code
    assert said == f"tfdist-run: ended by {number.name}; no rank was running.\n"


# Hosts, which are this machine under another address.

_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift 2
{before}
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$*"
"""


@pytest.fixture
def far(tmp_path):
    """Flags and variables of a job on another host; before it does what it is told, it runs a command."""

    def make(before=""):
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(_SSH.format(before=before))
        program.chmod(0o755)
        flags = ["-np=2", "-H=127.0.0.2:2", "--engine=tensorflow", "--"]
        return flags, {"PATH": f"{program.parent}:{os.environ['PATH']}"}

    return make


@pytest.mark.parametrize("is_urgent", [False, True], ids=["once", "twice"])
def test_ctrl_c_ends_ranks_on_other_hosts(jobs, far, is_urgent):
    flags, environment = far()
    deaf = "import os, signal; signal.signal(signal.SIGINT, lambda *_: os.write(1, b'told\\n'))"
    script = (deaf if is_urgent else "") + _RANK.format(more="")
    job = jobs.start(*flags, *PYTHON, script, environment=environment)
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    if is_urgent:
        said += wait_for(job, "[0] told", "[1] told")
        job.send_signal(signal.SIGINT)
    finished = finish(job, said)
    assert finished.returncode == 130 and HEAD not in finished.stdout
    assert finished.stdout.count("cleaned up") == (0 if is_urgent else 2)
    assert len(finished.stderr.splitlines()) == 1 and "ended by SIGINT" in finished.stderr


def test_ctrl_c_while_hosts_are_reached_is_one_line(jobs, far, tmp_path):
    flags, environment = far(f"touch {tmp_path}/reached-$$; sleep 1000")
    job = jobs.start(*flags, "true", environment=environment)
    while len(list(tmp_path.glob("reached-*"))) < 2:
        assert job.poll() is None
    job.send_signal(signal.SIGINT)
    assert_said(finish(job), 130, "ended by SIGINT; no rank was running.")


# Ranks that train.


def on_terminal(jobs, *arguments):
    """Starts a job whose terminal is a new one; returns it, and the terminal's other end."""
    ours, theirs = pty.openpty()

    def take_terminal():
        heed_signals()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    job = jobs.start(*arguments, **streams, preexec_fn=take_terminal)
    os.close(theirs)
    return job, ours


def read_until(terminal, *words) -> str:
    """Reads a terminal until it has shown words, or without words until nobody writes there any more."""
    said = ""
    while not words or not all(word in said for word in words):
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # Linux' end of a terminal.
            part = b""
        if not part:
            assert not words, said
            return said
        said += part.decode(errors="replace")
    return said


def test_ctrl_c_at_a_terminal_is_one_line(jobs):
    job, terminal = on_terminal(jobs, *TWO, *PYTHON, _RANK.format(more=""))
    read_until(terminal, "[0] up", "[1] up")
    os.write(terminal, b"\x03")
    said = read_until(terminal)
    os.close(terminal)
    assert job.wait(TIMEOUT) == 130
    lines = said.replace("^C", "").split("\r\n")
    assert sorted(lines) == ["", "[0] cleaned up", "[1] cleaned up", f"tfdist-run: {ENDED}"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
@pytest.mark.parametrize(
    ("moment", "way"),
    [
        ("import", "terminal"),
        ("import", "group"),
        ("training", "launcher"),
        ("training", "terminal"),
        ("saving", "group"),
        ("saving", "terminal"),
    ],
)
def test_ctrl_c_ends_a_training(jobs, tmp_path, engine, moment, way):
    skip_without(engine)
    sign = "importing" if moment == "import" else moment
    signs = ["[0] saving"] if moment == "saving" else [f"[0] {sign}", f"[1] {sign}"]
    arguments = ["-np=2", f"--engine={engine}", "--", sys.executable, SCRIPT, moment, tmp_path]
    if way == "terminal":
        job, terminal = on_terminal(jobs, *arguments)
        read_until(terminal, *signs)
        os.write(terminal, b"\x03")
        said = read_until(terminal).replace("^C", "").replace("\r\n", "\n")
        os.close(terminal)
        job.wait(TIMEOUT)
    else:
        job = jobs.start(*arguments)
        wait_for(job, *signs)
        (os.killpg if way == "group" else os.kill)(job.pid, signal.SIGINT)
        said = "".join(job.communicate(timeout=TIMEOUT))
    assert job.returncode == 130, said
    *ranks, last = said.splitlines()
    kept = ""
    if moment == "saving":
        kept = f" The newest checkpoint is {latest(tmp_path)}."
    assert last == f"tfdist-run: {ENDED}{kept}", said
    # A rank may end by another's end, without `finally`.
    assert {line.partition("] ")[2] for line in ranks} <= {"last words", sign}, said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_sigterm_ends_a_training_without_a_checkpointer(jobs, engine):
    skip_without(engine)
    job = jobs.start("-np=2", f"--engine={engine}", "--", sys.executable, SCRIPT, "training")
    said = wait_for(job, "[0] training", "[1] training")
    job.terminate()
    finished = finish(job, said)
    assert_said(finished, 143, "ended by SIGTERM; no rank is running any more.")
    assert len(finished.stdout.splitlines()) == 2
