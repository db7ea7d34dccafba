"""What a data parallel `fit` on two ranks imports, and how deep its collectives lie."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.sources import ROOT

__all__ = ["collective_frames", "gradient_frames", "imported_lines"]

_SECONDS = 240


@functools.cache
def _fit(kind: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tests.house.programs.fit", kind, f"{folder}/run"]
        engine = "horovod" if importlib.util.find_spec("horovod") else "tensorflow"
        launcher = [sys.executable, "-m", "tfdist.launch.run.main", "-np", "2"]
        found = subprocess.run(
            [*launcher, f"--engine={engine}", "--", *program],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            cwd=ROOT,
        )
    lines = [line for line in found.stdout.splitlines() if '"imported"' in line]
    if found.returncode or not lines:
        raise RuntimeError(f"The ranks ended with code {found.returncode}: {found.stderr[-2000:]}")
    return json.loads(lines[0].partition(" ")[2])


def imported_lines() -> int:
    """The lines of all modules of tfdist that a `fit` with a `Checkpointer` has imported."""
    total = 0
    for name in _fit("PLAIN")["imported"]:
        path = ROOT.joinpath(*name.split("."))
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        total += len(Path(module).read_text().splitlines())
    return total


def gradient_frames() -> list[str]:
    """The frames from `fit` to the engine's all-reduce of a gradient, with callbacks that add to a step."""
    return _fit("CALLBACKS")["gradient"]


def collective_frames() -> list[str]:
    """The frames from a user's `all_reduce` to the engine's."""
    return _fit("PLAIN")["collective"]
