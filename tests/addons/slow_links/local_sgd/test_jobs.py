"""A rank that dies costs no more steps than there are between two syncs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import skip_without

ROOT = Path(__file__).parents[4]
STEPS, SYNC_EVERY = 28, 5


def run(engine: str, folder: Path, dies_at: int, *flags: str) -> tuple[list[int], list]:
    folder.mkdir()
    program = os.path.join(os.path.dirname(sys.executable), "tfdist-run")
    job = [sys.executable, "-m", "tests.addons.slow_links.local_sgd.job", str(folder), str(dies_at)]
    done = subprocess.run(
        [program, "-np=2", f"--engine={engine}", "--watchdog_seconds=60", *flags, "--", *job],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ("SIGKILL" in done.stderr) == bool(dies_at)
    ends = [np.load(folder / f"end-{rank}.npz") for rank in range(2)]
    steps = [int(line) for line in (folder / "steps").read_text().split()]
    return steps, [[end[name] for name in end.files] for end in ends]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_a_rank_that_dies_costs_a_few_steps(tmp_path, engine):
    skip_without(engine)
    steps, whole = run(engine, tmp_path / "whole", 0)
    assert steps == list(range(1, STEPS + 1))
    again, ends = run(engine, tmp_path / "killed", 14, "--max_restarts=1", "--restart_seconds=1")
    # Steps that were made twice, and that in which the rank died.
    assert 0 < len(again) - STEPS <= SYNC_EVERY
    for end in (*ends, whole[1]):
        for own, right in zip(end, whole[0], strict=True):
            np.testing.assert_array_equal(own, right)
