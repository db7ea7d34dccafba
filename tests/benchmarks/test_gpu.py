"""The program for a GPU is tried here as far as it goes: small sizes, ranks on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.table import table

ROOT = Path(__file__).parents[2]
QUICK = ("attention", "fused-attention")
#: What the parts find on a CPU, by a name of theirs.
EXPECTED = {
    "libraries": ("sum", 3.0),
    "sums-tensorflow": ("wrong", 0),
    "sums-horovod": ("wrong", 0),
    "ffi-sum": ("right", True),
    "deterministic": ("equal", True),
}


def rehearse(names, path, *flags: str) -> tuple[dict[str, dict], str]:
    """The lines of some parts, and what is printed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", f"--only={','.join(names)}"]
    ran = subprocess.run(
        [*command, f"--json={path}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    return program.read(str(path)), ran.stdout + ran.stderr


@pytest.mark.timeout(200)
def test_parts_add_lines_and_are_not_repeated(tmp_path):
    path = tmp_path / "gpu.json"
    found, said = rehearse(QUICK, path)
    assert set(found) == set(QUICK), said
    assert found["attention"]["result"]["whole/64"] > 0
    # It got as far as the call, of which a CPU has none.
    assert "__cudnn$fmhaSoftmax for Host" in found["fused-attention"]["result"]["said"]
    assert "| attention " in said
    before = path.read_text()
    rehearse(QUICK, path, f"--skip_done={path}")
    assert path.read_text() == before


def test_a_part_that_hangs_or_fails_is_a_line_too():
    (part,) = (each for each in PARTS if each.name == "attention")
    line = program.run_part(part, 0.2, True)
    assert line["timed_out"] == 0.2 and "result" not in line
    line = program.run_part(Part("none", "", 60.0, ""), 60.0, True)
    assert "ValueError" in line["said"] and line["code"] == 1
    text = table({"attention": {"part": "attention", "timed_out": 5.0, "said": "waits | here"}})
    assert "no answer within 5 s: waits / here" in text


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_parts_run_without_a_gpu(tmp_path):
    names = [part.name for part in PARTS if part.name != "gpt-keras-jax"]
    path = tmp_path / "gpu.json"
    found, said = rehearse(names, path, "--budget=1500")
    lacking = [name for name in names if "result" not in found.get(name, {})]
    assert not lacking, json.dumps([found.get(name) for name in lacking], indent=1) + said
    for name, (what, value) in EXPECTED.items():
        assert found[name]["result"][what] == value, found[name]
    for name in ("parity-tensorflow", "parity-horovod"):
        assert max(found[name]["result"].values()) < 1e-5
