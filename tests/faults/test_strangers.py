"""A job goes on as if nothing had been while strangers call at every port that it listens on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.attacks import attack, listening_addresses
from tests.conftest import skip_without

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "attacked_job.py"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_strangers_at_every_port_change_nothing(tmp_path, engine):
    skip_without(engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    try:
        alone = run_job(tmp_path / "alone", engine, lambda addresses: None)
        attacked = run_job(tmp_path / "attacked", engine, attack)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for expected, found in zip(alone, attacked, strict=True):
        np.testing.assert_array_equal(found, expected)


def run_job(folder: Path, engine: str, disturb) -> list[np.ndarray]:
    """The weights at the end of a job that was disturbed in the middle of its training."""
    folder.mkdir()
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        "-np=2",
        f"--engine={engine}",
        "--",
        sys.executable,
        str(PROGRAM),
        str(folder),
        "64",
    ]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "log", "w+") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(folder / "under way", job)
            addresses = listening_addresses(psutil.Process(job.pid))
            # The heartbeats, and the rendezvous or both servers.
            assert len(addresses) >= 2
            assert all(host == "127.0.0.1" for host, _ in addresses)
            disturb(addresses)
            (folder / "stop").touch()
            code = job.wait(90.0)
        finally:
            job.kill()
            job.wait()
            log.seek(0)
            story = log.read()[-6000:]
            print(story)
    assert code == 0, story
    assert "watchdog" not in story, story
    with np.load(folder / "weights.npz") as weights:
        return list(weights.values())


def wait_for(path: Path, job: subprocess.Popen, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
