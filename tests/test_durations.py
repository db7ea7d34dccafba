"""Which cases are too long for `make test`."""

from __future__ import annotations

from pathlib import Path

from tests.durations import LIMIT, LIMIT_OF_QUICKEST, mark_long


class Case:
    """As much of a collected case as is looked at."""

    def __init__(self, path: str, name: str, *marks: str):
        self.path, self.name, self.nodeid = path, name, f"{path}::{name}"
        self.marks = list(marks)

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.append(mark.name)


def test_long_cases_are_slow_but_the_quickest_of_a_file():
    cases = [
        Case("a.py", "test_long"),
        Case("a.py", "test_short"),
        Case("a.py", "test_matrix", "slow"),
        Case("b.py", "test_longer"),
        Case("b.py", "test_long"),
        Case("c.py", "test_new"),
        Case("c.py", "test_at_the_limit"),
        Case("c.py", "test_under_horovodrun"),
        Case("d.py", "test_longest"),
    ]
    seconds = {
        "a.py::test_long": 6.0,
        "a.py::test_short": 1.0,
        "a.py::test_matrix": 9.0,
        "b.py::test_longer": 8.0,
        "b.py::test_long": 7.0,
        "c.py::test_at_the_limit": LIMIT,
        "c.py::test_under_horovodrun": 15.0,
        "d.py::test_longest": LIMIT_OF_QUICKEST + 0.1,
    }
    mark_long(cases, seconds)
    assert [case.nodeid for case in cases if "slow" in case.marks] == [
        "a.py::test_long",
        "a.py::test_matrix",
        "b.py::test_longer",
        "d.py::test_longest",
    ]
    assert cases[2].marks == ["slow"]


def test_durations_are_written(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(
        "import pytest\n"
        "from tests import durations\n"
        "def pytest_configure(config):\n"
        "    durations.FILE = config.rootpath / 'durations.json'\n"
        "    durations.FILE.write_text('{\"other\": 2.0}')\n"
        "    config.pluginmanager.register(durations.Recorder())\n"
    )
    pytester.makepyfile(
        "import time\ndef test_long():\n    time.sleep(1.1)\ndef test_short():\n    pass\n"
    )
    assert pytester.runpytest_subprocess().ret == 0
    text = (pytester.path / "durations.json").read_text()
    assert '"other": 2.0' in text and '::test_long": 1.1' in text and "test_short" not in text


pytest_plugins = ["pytester"]
