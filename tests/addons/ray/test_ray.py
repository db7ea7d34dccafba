"""Ray Train on a local cluster of two workers: both engines, a killed worker, and a cluster that grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import skip_without

pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]


def run(folder: Path, **config) -> dict:
    """The result of a job."""
    folder.mkdir()
    variables = {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    job = subprocess.run(
        [sys.executable, "-m", "tests.addons.ray.job", str(folder), json.dumps(config)],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-6000:]
    starts = [json.loads(line) for line in (folder / "starts").read_text().splitlines()]
    found = {"starts": starts}
    for name in ("result", "outcome"):
        found |= json.loads((folder / name).read_text())
    return found


def check_same(one: dict, other: dict) -> None:
    assert one["loss"] == other["loss"]
    for value, right in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_array_equal(value, right)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("engine", "mesh"), [("horovod", {}), ("tensorflow", {}), ("horovod", {"tensor": 2})]
)
def test_a_killed_worker_changes_nothing(tmp_path, engine, mesh):
    skip_without(engine)
    whole = run(tmp_path / "whole", engine=engine, mesh=mesh)
    assert whole["starts"] == [{"size": 2, "step": 0}]
    assert whole["metrics"]["epoch"] == 3 and whole["metrics"]["accuracy"] > 0.5
    # The last report has the state at the end.
    saved = tmp_path / "whole/storage/digits/checkpoints"
    assert whole["checkpoint"] == str(max(saved.glob("step-*")))
    killed = run(tmp_path / "killed", engine=engine, mesh=mesh, kill=[23, 1])
    assert [start["size"] for start in killed["starts"]] == [2, 2]
    assert killed["starts"][1]["step"] in (15, 20)
    check_same(killed, whole)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_that_grows(tmp_path):
    """One worker starts alone; once a node joins, Ray starts two from the newest checkpoint."""
    skip_without("horovod")
    config = {"workers": [1, 2], "joins": 25.0, "pause": 0.25, "epochs": 12}
    found = run(tmp_path / "grows", **config)
    sizes = [start["size"] for start in found["starts"]]
    assert sizes[0] == 1 and sizes[-1] == 2, found["starts"]
    assert found["starts"][-1]["step"] > 0
