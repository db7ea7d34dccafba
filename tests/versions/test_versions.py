"""Versions out of the range are refused in one line; the range is that of the installer."""

from __future__ import annotations

import configparser
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


def test_the_table_has_a_row_for_each_pair():
    some = {"py3.11-tf2.21-k3.15": matrix.Result(True, "70 passed")}
    rows = matrix.table(some).splitlines()
    assert len(rows) == 2 + len(matrix.PAIRS)
    assert rows[2].startswith("| 2.21 | 3.15 | green: 70 passed | not run")
    assert len({cell.name for cell in matrix.cells()}) == len(matrix.PYTHONS) * len(matrix.PAIRS)
