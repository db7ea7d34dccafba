"""Whole jobs that are killed or told to end, and go on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.programs import arrays_of, state_of
from tests.conftest import full_cross, skip_without
from tfdist.utils.lazy import find_addon

ROOT = Path(__file__).parents[2]
STEPS = 60
PHASES = ["step", "mid-step", "save", "manifest"]
ENGINES = ("horovod", "tensorflow")
LAYOUTS = {
    "data": ("perceptron", 2, {}),
    "tensor": ("gpt", 2, {"data": 1, "tensor": 2}),
    "pipeline": ("gpt", 2, {"data": 1, "pipeline": 2}),
    "zero": ("gpt", 3, {"zero_stage": 3}),
    "experts": ("experts", 2, {"data": 1, "expert": 2}),
    "tables": ("recommender", 2, {}),
    "context": ("gpt", 2, {"data": 1, "context": 2}),
}
if find_addon("recommenders") is None:
    del LAYOUTS["tables"]


def command(engine: str, folder: Path, layout: str, kills, *flags: str) -> list[str]:
    kind, ranks, mesh = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    job = [sys.executable, "-m", "tests.checkpoint.job", str(folder), kind]
    return [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        f"-np={ranks}",
        f"--engine={engine}",
        "--watchdog_seconds=30",
        *flags,
        "--",
        *job,
        json.dumps(mesh),
        json.dumps(kills),
    ]


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def end_of(folder: Path):
    """The arrays and the state of the newest checkpoint."""
    path = str(sorted((folder / "saved").glob("step-*/manifest.json"))[-1].parent)
    return arrays_of(path), state_of(path)


def check_same_end(one: Path, other: Path) -> None:
    (arrays, state), (others, other_state) = end_of(one), end_of(other)
    assert state["history"] == other_state["history"]
    assert state["random"] == other_state["random"]
    assert arrays.keys() == others.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def plan(layout: str, count: int) -> list[tuple[int, str, int]]:
    """Where each run is killed: the step, in what phase, and on which rank."""
    chance = random.Random(layout)
    ranks = LAYOUTS[layout][1]
    steps = sorted([1, *(chance.randint(1, STEPS - 4) for _ in range(count - 1))])
    found = []
    for number, step in enumerate(steps):
        phase = PHASES[number % len(PHASES)]
        # Only the chief writes the manifest.
        found.append((step, phase, 0 if phase == "manifest" else chance.randrange(ranks)))
    return found


def never_killed(engine: str, layout: str, folder: Path) -> Path:
    """Where a job ended that nothing happened to."""
    skip_without(engine)
    whole = run(command(engine, folder / "whole", layout, []), 240)
    assert whole.returncode == 0, whole.stdout[-3000:] + whole.stderr
    return folder / "whole"


def check_killed(engine: str, layout: str, folder: Path, whole: Path, kills) -> None:
    count = len(kills)
    restarts = [f"--max_restarts={count}", "--restart_seconds=1"]
    killed = run(command(engine, folder / "killed", layout, kills, *restarts), 120 + 100 * count)
    story = killed.stdout[-6000:] + killed.stderr[-3000:]
    assert killed.returncode == 0, story
    assert killed.stderr.count("SIGKILL") >= count - 2, story
    check_same_end(whole, folder / "killed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of the data-parallel job, over Horovod."""
    return never_killed("horovod", "data", tmp_path_factory.mktemp("jobs"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_the_middle(tmp_path, whole):
    kills = [(11, "mid-step", 1), (41, "manifest", 0)]
    check_killed("horovod", "data", tmp_path, whole, kills)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tables_go_on_where_they_were(tmp_path):
    kills = [(7, "step", 1), (23, "save", 0), (44, "mid-step", 1)]
    whole = never_killed("horovod", "tables", tmp_path)
    check_killed("horovod", "tables", tmp_path, whole, kills)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=full_cross)])
def test_killed_at_twenty_places(tmp_path, engine, layout, every):
    """At every tenth of the places, other ones for each engine of a layout; in the full cross at all."""
    whole = never_killed(engine, layout, tmp_path)
    first = (2 * list(LAYOUTS).index(layout) + ENGINES.index(engine)) % every
    check_killed(engine, layout, tmp_path, whole, plan(layout, 20)[first::every])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_told_to_end(tmp_path, whole):
    with subprocess.Popen(
        command("horovod", tmp_path / "told", "data", [], "--save_seconds=60"),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        wait_for_manifest(tmp_path / "told" / "saved", job)
        for _ in range(4):  # Schedulers repeat it: only the first one counts.
            job.terminate()
            time.sleep(0.05)
        said = job.communicate(timeout=90)[0]
    assert job.returncode == 76, said[-3000:]
    assert "start the job again to resume" in said
    again = run(command("horovod", tmp_path / "told", "data", []), 240)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr
    check_same_end(whole, tmp_path / "told")


def wait_for_manifest(folder: Path, job: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not list(folder.glob("step-*/manifest.json")):
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
