"""Versions out of the range are refused in one line; the range is that of the installer."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions import matrix
from tfdist.runtime.versions import ANY_VERSION, RANGES, check_version, range_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def none_let_in(monkeypatch):
    monkeypatch.delenv(ANY_VERSION, raising=False)


def test_the_range_is_that_of_the_installer():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options"]["install_requires"].split()
    for name in RANGES:
        assert f"{name}{range_of(name)}" in wanted


@pytest.mark.parametrize("name", RANGES)
def test_what_is_out_of_the_range_is_refused_in_one_line(name, monkeypatch):
    first, end = (".".join(map(str, version)) for version in RANGES[name])
    check_version(name, f"{first}.0")
    check_version(name, f"{first}.1")
    for version in ("2.3.1", f"{end}.0", "99.0.0", f"{first}.0.dev20260101", "1", ""):
        with pytest.raises(ImportError) as caught:
            check_version(name, version)
        assert range_of(name) in str(caught.value) and "\n" not in str(caught.value)
        monkeypatch.setenv(ANY_VERSION, "1")
        check_version(name, version)
        monkeypatch.delenv(ANY_VERSION)


#: A program that meets a Keras of another version, which has a module elsewhere.
_MEETS = """
import sys, wrapt
def move(keras):
    keras.__version__ = {version!r}
    del keras.src.backend.tensorflow.nn
    sys.modules["keras.src.backend.tensorflow.nn"] = None
wrapt.register_post_import_hook(move, "keras")
from tfdist.launch.train import main as train
train.PROGRAM.run(["tfdist-train", "--model=convnet"])
"""


@pytest.mark.parametrize(
    ("version", "tries"),
    [
        pytest.param("3.16.0.dev20261027", "0", id="refused", marks=pytest.mark.slow),
        pytest.param("3.17.0", "1", id="let in"),
    ],
)
def test_programs_refuse_another_keras_in_one_line(version, tries):
    """Also one that was let in, and has a name elsewhere."""
    job = subprocess.run(
        [sys.executable, "-c", _MEETS.format(version=version)],
        env=os.environ | {ANY_VERSION: tries, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line for line in job.stderr.splitlines() if line.startswith("tfdist-train: ")]
    assert job.returncode == 2 and len(lines) == 1, job.stderr
    assert "Traceback" not in job.stderr
    assert version in lines[0] and range_of("keras") in lines[0]
    assert ("keras.src.backend.tensorflow" in lines[0]) == (tries == "1")


def test_the_table_has_a_row_for_each_pair():
    some = {"py3.11-tf2.21-k3.15": matrix.Result(True, "70 passed")}
    rows = matrix.table(some).splitlines()
    assert len(rows) == 2 + len(matrix.PAIRS) + len(matrix.NEXT)
    assert rows[2].startswith("| 2.21 | 3.15 | green: 70 passed | not run")
    names = {cell.name for cell in matrix.cells()}
    assert len(names) == len(matrix.PYTHONS) * len(matrix.PAIRS) + len(matrix.NEXT)
