"""The notebooks, each run from its first cell to its last in a folder of its own, on real ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install '.[dev]' installs nbclient.")
nbformat = pytest.importorskip("nbformat", reason="pip install '.[dev]' installs nbformat.")
pytest.importorskip("ipykernel", reason="pip install '.[dev]' installs ipykernel.")

FOLDER = Path(__file__).parents[2] / "examples"
#: By notebook: what its cells print in the end, of which numbers are looked at below.
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def printed(name: str, folder: Path, monkeypatch) -> str:
    """What the cells of a notebook print, all together.

    Raises:
        CellExecutionError: A cell raised.
    """
    # Programs of this environment, and the tfdist that is tested, are found by what a cell starts.
    programs = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.get("text", "") for out in outputs)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_first_steps(tmp_path, monkeypatch):
    said = printed("first_steps.ipynb", tmp_path, monkeypatch)
    found = re.findall(r"\[0\] Accuracy (\S+)%, loss (\S+), on (\d) rank", said)
    assert [ranks for *_, ranks in found] == ["1", "2"], said
    assert float(found[0][0]) > 80 and found[0][:2] == found[1][:2]
    assert float(re.search(r"weights differ by (\S+) at most", said)[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_find_the_layout(tmp_path, monkeypatch):
    said = printed("find_the_layout.ipynb", tmp_path, monkeypatch)
    stages = re.findall(r"ZeRO-(\d): .* (fits|does not fit);", said)
    assert stages[0] == ("0", "does not fit") and stages[3] == ("3", "fits")
    assert len(re.findall(r"^ *\d+ GPUs: ", said, re.MULTILINE)) == 5
    losses = [float(loss) for loss in re.findall(r"Loss (\S+) with data=", said)]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-3, said
    measured = [float(row) for row in re.findall(r"parameters .* (\S+)\s*$", said, re.MULTILINE)]
    replicated, sharded, split = measured
    assert sharded < 0.6 * replicated and split < 0.7 * replicated


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_hold_no_output(name):
    """Outputs of some machine's are no part of the repository, and change with each run."""
    notebook = json.loads((FOLDER / name).read_text())
    nbformat.validate(nbformat.from_dict(notebook))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
