"""Programs that start compilers and pip, and are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import heed_signals
from tfdist.launch.sessions import run_in_session

#: Stands in for pip or venv: starts another process and works for ever.
WORKER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["TEST_PIDS"] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(os.environ["TEST_PIDS"] + ".part", os.environ["TEST_PIDS"])
time.sleep(600)
"""
PROGRAMS = {
    "tfdist-install-horovod": (
        "pip",
        "from tfdist.launch.install_horovod import build, main as program;"
        "build.check_toolchain = lambda options: None;",
        ["--force", "--cache_dir={}"],
    ),
    "python -m benchmarks.environments": (
        "venv",
        "from benchmarks import environments as program;",
        ["--peers={}"],
    ),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_signal_ends_all_that_was_started(tmp_path, name, number):
    module, statements, arguments = PROGRAMS[name]
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    (tmp_path / module / "__main__.py").write_text(WORKER)
    pids = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TEST_PIDS": str(pids)}
    program = subprocess.Popen(
        [sys.executable, "-c", f"{statements} program.run()"]
        + [argument.format(tmp_path) for argument in arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,
    )
    try:
        deadline = time.monotonic() + 60.0
        while not pids.exists():
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in started)
        program.send_signal(number)
        said, _ = program.communicate(timeout=30.0)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    assert "Traceback" not in said
    deadline = time.monotonic() + 10.0
    while any(map(is_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, started))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("statement", "argument"),
    [
        ("from tfdist.launch.install_horovod.main import run", "--cache_dir="),
        ("from tfdist.launch.install_horovod.main import run", "--cache_dir= "),
        ("from benchmarks.environments import run", "--peers="),
    ],
)
def test_a_folder_without_a_name_is_refused(tmp_path, statement, argument):
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; run()", argument],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert argument.strip() in done.stderr and "Received:" in done.stderr
    assert not list(tmp_path.iterdir())


def test_output_and_code_are_those_of_the_command():
    done = run_in_session(
        [
            sys.executable,
            "-c",
            "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
