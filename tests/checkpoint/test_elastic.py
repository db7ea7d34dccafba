"""A job that loses a rank goes on with fewer, and with more once there is room again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.test_jobs import ROOT, environment
from tests.conftest import skip_without

SAMPLES, BATCH, EPOCHS = 240, 12, 3


def lines(folder: Path) -> list[dict]:
    """What all ranks have noted; the last line of a killed one may lack its end."""
    found = []
    for path in folder.glob("log-*"):
        for line in path.read_text().split("\n"):
            if line.endswith("}"):
                found.append(json.loads(line))
    return sorted(found, key=lambda line: line["time"])


def wait_for(folder: Path, job: subprocess.Popen, condition, seconds: float = 90.0) -> dict:
    """The first line that is as asked for."""
    end = time.monotonic() + seconds
    while True:
        for line in lines(folder):
            if condition(line):
                return line
        assert job.poll() is None, job.communicate()[0][-4000:]
        assert time.monotonic() < end, (folder / "said").read_text()[-4000:]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_a_rank_goes_and_comes_back(tmp_path, engine):
    skip_without(engine)
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:3\n127.0.0.1\n")
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        "-np=4",
        "--min_np=2",
        f"--engine={engine}",
        f"--host_discovery_script=cat {hosts}",
        "--watchdog_seconds=30",
        "--",
        sys.executable,
        "-m",
        "tests.checkpoint.elastic_job",
        str(tmp_path),
    ]
    with (
        open(tmp_path / "said", "w") as said,
        subprocess.Popen(
            command, env=environment(), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT
        ) as job,
    ):
        try:
            victim = wait_for(tmp_path, job, lambda line: line["place"] >= [0, 8])
            assert victim["size"] == 4
            hosts.write_text("localhost:3\n")
            os.kill(victim["pid"], signal.SIGKILL)
            killed = time.time()
            fewer = wait_for(tmp_path, job, lambda line: line["size"] == 3)
            assert fewer["time"] - killed < 60
            hosts.write_text("localhost:3\n127.0.0.1\n")
            came_back = time.time()
            more = wait_for(
                tmp_path, job, lambda line: line["size"] == 4 and line["time"] > came_back
            )
            assert more["time"] - came_back < 60
            assert job.wait(timeout=120) == 0, (tmp_path / "said").read_text()[-4000:]
        finally:
            job.kill()
    check_log(tmp_path)
    said = (tmp_path / "said").read_text()
    # Of each of the two restarts, by the chief alone.
    told = re.findall(
        r"\[0\] Recovered in [\d.]+ s: [\d.]+ start, [\d.]+ load, [\d.]+ replay\.", said
    )
    assert len(told) == said.count("Recovered in") == 2, said[-4000:]


def check_log(folder: Path) -> None:
    """No saved step is repeated, and every epoch has each sample once."""
    noted = lines(folder)
    runs = sorted({line["run"] for line in noted})
    assert len(runs) >= 3
    for run in runs:
        saved = (folder / f"start-{run}").read_text()
        step = int(Path(saved).name.split("-")[1]) if saved else 0
        epoch, batch = min(line["place"] for line in noted if line["run"] == run)
        assert epoch * (SAMPLES // BATCH) + batch == step
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for batch in range(SAMPLES // BATCH):
            of_step = [line for line in noted if line["place"] == [epoch, batch]]
            # What a later run did again is what counted.
            last = max(line["run"] for line in of_step)
            seen += [n for line in of_step if line["run"] == last for n in line["ids"]]
        assert sorted(seen) == list(range(SAMPLES)), epoch
