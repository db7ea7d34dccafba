"""TensorFlow's talk at its start is left out of a program that runs alone; errors and last words are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import skip_without
from tests.launch.processes import BIN
from tfdist.runtime.lock_owner import JOB

#: Says by the C library's stderr what TensorFlow says, and something of its own.
_SAYS = r"""
import os, sys
from tfdist.launch.flags.quiet import quiet_start
def say(text):
    os.write(2, text.encode())
with quiet_start():
    say("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
    say("I0000 00:00:1700000000.000001    7 port.cc:153] oneDNN custom operations are on.\n")
    say("E0000 00:00:1700000000.000002    7 cuda_platform.cc:52] failed call to cuInit: 303\n")
    say("E0000 00:00:1700000000.000003    7 other.cc:5] a true error\n")
    print("from Python", file=sys.stderr)
    {inside}
say("I0000 00:00:1700000000.000004    7 port.cc:1] after the start\n")
print("level", os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


def said(inside="pass", code=0, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in (JOB, "TF_CPP_MIN_LOG_LEVEL")}
    done = subprocess.run(
        [sys.executable, "-c", _SAYS.replace("{inside}", inside)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", **variables},
    )
    assert done.returncode == code, done.stderr
    return done.stderr, done.stdout


def test_what_says_nothing_of_the_training_is_left_out():
    errors, output = said()
    lines = [line.rpartition("] ")[2] for line in errors.splitlines()]
    assert lines == ["a true error", "from Python", "after the start"]
    assert output == "level 2\n"


@pytest.mark.parametrize("inside", ["os.abort()", "os.kill(os.getpid(), 9)"])
def test_the_last_words_of_a_crash_come_through(inside):
    code = -6 if "abort" in inside else -9
    errors, _ = said(f'say("F0000 check failed"); {inside}', code)
    assert errors.endswith("from Python\nF0000 check failed")


def test_an_exception_is_told():
    errors, _ = said("raise KeyError('inside')", 1)
    assert "KeyError: 'inside'" in errors and "oneDNN" not in errors


@pytest.mark.parametrize("variables", [{"TF_CPP_MIN_LOG_LEVEL": "0"}, {JOB: "of tfdist-run"}])
def test_all_is_said_where_it_is_asked_for_and_where_tfdist_run_listens(variables):
    errors, _ = said(**variables)
    assert "oneDNN" in errors and "failed call to cuInit" in errors


def test_a_program_without_stderr_runs():
    code = _SAYS.replace("{inside}", "pass").replace("os.write(2, text.encode())", "pass")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "-", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["level 2"])


def started(*command: str) -> list[str]:
    """What a program that starts TensorFlow prints; to stderr it writes nothing."""
    environment = {k: v for k, v in os.environ.items() if k not in (JOB, "TF_CPP_MIN_LOG_LEVEL")}
    done = subprocess.run(
        [os.path.join(BIN, command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=180,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(200)
def test_tfdist_train_alone_says_nothing_of_tensorflows_start():
    lines = started("tfdist-train", "--model=mlp", "--epochs=1", "--threads=1")
    assert "on 1 rank(s)" in lines[-1]


@pytest.mark.timeout(200)
def test_the_peak_of_one_process_is_one_line():
    (line,) = started("tfdist-bench", "peak", "--size=64", "--seconds=0.1", "--threads=1")
    assert line.startswith("peak=") and "FLOP/s per rank on 1 ranks" in line


@pytest.mark.timeout(200)
def test_the_proof_of_horovod_is_one_line():
    skip_without("horovod")
    (line,) = started("tfdist-install-horovod", "--check")
    assert line.startswith("Tested: 2 ranks on this CPU computed the right sum")


def test_each_compiled_library_is_one_line(tmp_path):
    install = f"""
from pathlib import Path
from tfdist.launch.install_horovod.native_build import install_native
print(install_native(Path({str(tmp_path)!r})))
"""
    for line in started(sys.executable, "-c", install):
        assert "compiled library (" in line


def test_a_report_is_read_without_tensorflow(tmp_path):
    code = """
import sys
from tfdist.launch import report
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
import tfdist.addons.monitoring.run_report
print("tensorflow" in sys.modules, "keras" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False False\n"
