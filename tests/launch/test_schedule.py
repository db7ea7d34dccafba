"""`tfdist-schedule`: the clock it prints, the files it writes, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys


def schedule(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.launch.schedule", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_clock_of_1f1b():
    finished = schedule("--schedule=1f1b", "--stages=2", "--microbatches=3")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[0].split() == ["clock", *map(str, range(8))]
    assert lines[1].split() == ["rank", "0", "F0", "F1", ".", "B0", "F2", "B1", ".", "B2"]
    assert lines[2].split() == ["rank", "1", ".", "F0", "B0", "F1", "B1", "F2", "B2", "."]
    assert "idle for 25.0% of the step, or 33.3% of their compute time" in finished.stdout
    assert "by rank: 2, 1." in finished.stdout
    assert finished.stderr == ""


def test_a_trace_has_a_row_for_each_rank(tmp_path):
    path = tmp_path / "trace.json"
    finished = schedule("--schedule=zero-bubble", "--stages=3", f"--trace={path}")
    assert finished.returncode == 0, finished.stderr
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    spans = [e for e in events if e["ph"] == "X"]
    # Three kinds of work, 8 micro-batches, 3 ranks; a unit of the clock is a second.
    assert len(spans) == 3 * 8 * 3
    assert all(e["dur"] == 1e6 for e in spans)


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "picture.svg"
    finished = schedule("--schedule=interleaved", "--stages=2", f"--picture={path}")
    assert finished.returncode == 0, finished.stderr
    assert "<svg" in path.read_text()[:1000]


def test_refusals():
    for arguments, said in (
        (["--schedule=2f2b"], "--schedule"),
        (
            ["--schedule=interleaved", "--stages=4", "--microbatches=6"],
            "multiple of the pipeline size",
        ),
        (["--stages=0"], "--stages"),
        (["--trace=/nowhere/at/all.json"], "cannot be written"),
    ):
        finished = schedule(*arguments)
        assert finished.returncode == 2
        assert len(finished.stderr.splitlines()) == 1
        assert said in finished.stderr
