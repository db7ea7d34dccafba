"""A table that does not fit on a rank trains in parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.zero.test_limited_memory import run

PROGRAM = Path(__file__).with_name("embedding_memory.py")
#: 512 for the table, and 512 for the state of Adagrad. A fourth has 128 of each; an update of Keras'
#: Adagrad takes some arrays of the table's size besides.
MEBIBYTES = 768


@pytest.mark.slow
def test_the_whole_does_not_fit():
    job = run("table", PROGRAM, MEBIBYTES)
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    assert "Unable to allocate 512. MiB" in story or "ResourceExhaustedError" in story, story
    assert not re.search(r"losses \d", job.stdout), story


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_parts_train(placement):
    job = run(placement, PROGRAM, MEBIBYTES)
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode == 0, story
    (line,) = [line for line in job.stdout.splitlines() if re.search(r"losses \d", line)]
    losses = [float(word) for word in line.partition("losses")[2].split()]
    assert len(losses) == 5 and losses[-1] < losses[0], story
