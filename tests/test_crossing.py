"""Eight runs of the slow cases take all values; what is quick, or named, is in each."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.crossing import LONG, LONG_SECONDS, PARTS, left_out

ROOT = Path(__file__).parents[1]


class Case:
    """As much of a collected case as is looked at."""

    def __init__(
        self, name: str, marks: tuple = (pytest.mark.slow,), every: bool = False, **params
    ):
        self.path, self.originalname = "a.py", name
        self.nodeid = f"a.py::{name}{sorted(params.items())}"
        self.function = types.SimpleNamespace(**({"runs_every_case": True} if every else {}))
        self.marks = marks
        if params:
            self.callspec = types.SimpleNamespace(params=params)

    def iter_markers(self, name: str) -> list:
        """Its marks of a name."""
        return [mark.mark for mark in self.marks if mark.name == name]


def runs(cases: list, seconds: dict[str, float]) -> list[set]:
    """What is run with each `--cross`."""
    return [set(cases) - left_out(cases, part, seconds) for part in PARTS]


def test_of_a_long_parameter_each_value_is_in_one_run_of_eight():
    cases = [Case("test", program=number) for number in range(len(PARTS) * LONG)]
    found = runs(cases, dict.fromkeys((each.nodeid for each in cases), 1.0))
    assert [len(some) for some in found] == [LONG] * len(PARTS)
    assert set.union(*found) == set(cases)


@pytest.mark.parametrize("seconds", [None, LONG_SECONDS + 1])
def test_long_cases_and_such_as_were_never_timed_are_divided(seconds):
    cases = [Case(f"test_{number}") for number in range(240)]
    cases += [Case(f"test_{number}", engine="horovod") for number in range(240)]
    known = {} if seconds is None else {each.nodeid: seconds for each in cases}
    found = runs(cases, known)
    assert sum(len(some) for some in found) == len(cases)
    assert set.union(*found) == set(cases)
    assert min(len(some) for some in found) > len(cases) // 12


def test_whether_a_case_is_run_does_not_depend_on_the_others():
    cases = [Case(f"test_{number}") for number in range(60)]
    alone = {each for each in cases if not left_out([each], "2", {})}
    assert alone == runs(cases, {})[1]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"marks": ()}, None), ({"every": True}, None), ({}, LONG_SECONDS)],
    ids=["quick", "every", "short"],
)
def test_what_is_quick_or_wanted_is_in_each_run(options, seconds):
    cases = [Case(f"test_{number}", program="one", **options) for number in range(20)]
    known = {} if seconds is None else {each.nodeid: seconds for each in cases}
    assert runs(cases, known) == [set(cases)] * len(PARTS)


def test_cases_of_the_full_cross_are_in_none():
    cases = [Case("test", marks=(pytest.mark.slow(full=True),))]
    assert runs(cases, {}) == [set()] * len(PARTS)


NAMED = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("value", range(40))
def test_divided(value):
    assert value >= 0
"""


@pytest.mark.parametrize(
    ("arguments", "expected"), [([], 5), (["-k", "divided"], 40)], ids=["an eighth", "named"]
)
def test_what_the_user_names_is_not_divided(tmp_path, arguments, expected):
    (tmp_path / "test_named.py").write_text(NAMED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, *arguments, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert f"{expected} passed" in ran.stdout
