"""Real ranks on which a second CPU stands for the GPU train what one process trains, on both engines."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import slow_but
from tests.gpu_like.trained import AXES

ROOT = Path(__file__).parents[2]
CASES = [(layout, engine) for layout in AXES for engine in ("tensorflow", "horovod")]


def train(layout: str, engine: str | None = None) -> dict:
    """What the script finds: on two ranks of an engine, or in one process."""
    command = [sys.executable, "-m", "tests.gpu_like.trained", layout]
    if engine is not None:
        runner = [sys.executable, "-m", "tfdist.launch.run.main", "-np", "2", f"--engine={engine}"]
        command = [*runner, "--", *command]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TF_NUM_INTRAOP_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if "FOUND" in line]
    return json.loads(line.partition("FOUND ")[2])


@functools.cache
def expected(layout: str) -> list[float]:
    """The losses of one process on its CPU."""
    kind = {"expert": "one-expert", "pipeline": "one-pipeline"}.get(layout, "one")
    return train(kind)["losses"]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("layout", "engine"), slow_but([("data", "tensorflow")], CASES))
def test_as_one_process(layout, engine):
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed.")
    found = train(layout, engine)
    assert all("CPU:1" in device for device in found["devices"])
    np.testing.assert_allclose(found["losses"], expected(layout), rtol=1e-5)
