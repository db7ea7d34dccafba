"""What does not fit on a rank as a whole: it ends with a clear error, and in parts it trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_without

PROGRAM = Path(__file__).with_name("limited_memory.py")
#: 512 for the whole training state; 128 for a fourth, 64 for two layers, and buffers.
MEBIBYTES = 384


def run(
    how: int | str, program: Path = PROGRAM, mebibytes: int = MEBIBYTES
) -> subprocess.CompletedProcess:
    """Runs a program on four ranks, under a limit of memory for each."""
    skip_without("horovod")
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        "-np=4",
        "--engine=horovod",
        "--",
        sys.executable,
        str(program),
        str(how),
        str(mebibytes),
    ]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        # The C library else keeps what was freed for each thread, which the limit counts; and the pool
        # that TensorFlow has beside oneDNN ends the process where the system gives no more.
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_the_whole_does_not_fit():
    job = run(0)
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    assert "ResourceExhaustedError" in story and "zero_stage" in story, story
    assert not re.search(r"losses \d", job.stdout), story


@pytest.mark.slow
def test_parts_train():
    job = run(3)
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode == 0, story
    (line,) = [line for line in job.stdout.splitlines() if re.search(r"losses \d", line)]
    losses = [float(word) for word in line.partition("losses")[2].split()]
    assert len(losses) == 5 and losses[-1] < losses[0], story
