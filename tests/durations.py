"""How long cases take on two cores, and which are too long for `make test`.

`pytest --record-durations` writes `durations.json`: the seconds of each slow case, and of each other one that
took one or more, without fixtures, which cases share. What the run did not reach stays as it is there.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
#: A case that takes longer is a slow one, unless its file has no quicker one.
LIMIT = 1.5
#: That of the quickest case of a file.
LIMIT_OF_QUICKEST = 10.0
_WRITE_SECONDS = 60.0
#: What users do first, and the figures of the house, stay in `make test`, however long they take.
ALWAYS = (
    "test_under_horovodrun",
    "test_the_demonstration_says_little",
    "test_commands[README.md",
    "test_no_figure_gets_worse",
)


def recorded() -> dict[str, float]:
    """The seconds of each case, by its id."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def mark_long(items: Sequence[pytest.Item], seconds: dict[str, float]) -> None:
    """Marks cases as slow that took too long; of each file the quickest one may take longer.

    Args:
        items: All cases that were collected.
        seconds: What each took.
    """
    quick = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            quick[item.path].append(item)
    for cases in quick.values():
        cases.sort(key=lambda case: seconds.get(case.nodeid, 0.0))
        for number, case in enumerate(cases):
            limit = LIMIT if number else LIMIT_OF_QUICKEST
            if seconds.get(case.nodeid, 0.0) > limit and not case.name.startswith(ALWAYS):
                case.add_marker(pytest.mark.slow)


class Recorder:
    """A plugin that writes down what cases take, every minute, in case the run is ended early."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._slow: set[str] = set()
        self._written_at = time.monotonic()

    def pytest_runtest_logreport(self, report):
        """Notes the time of a case that passed."""
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = report.duration
            if "slow" in report.keywords:
                self._slow.add(report.nodeid)
        if time.monotonic() - self._written_at > _WRITE_SECONDS:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self):
        """Adds them to the file."""
        known = {name: each for name, each in recorded().items() if name not in self._seconds}
        for name, each in self._seconds.items():
            if each >= 1.0 or name in self._slow:
                known[name] = round(each, 1)
        FILE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
        self._written_at = time.monotonic()
