"""A job that goes on without hosts that fail, and which runs it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tfdist.launch.run.hosts import Host
from tfdist.launch.run.remote import UnreachableError
from tfdist.launch.run.restarts import run_with_restarts
from tfdist.runtime.exit_codes import PERSISTENT_FAULT

THREE = (Host("a", 2), Host("b", 2), Host("c", 2))


@dataclasses.dataclass
class Ended:
    """What is asked of a run that is over."""

    failed: tuple[int, int] | None = None
    failed_at: float | None = None
    was_told: bool = False
    was_asked: bool = False


class Runs:
    """Runs that go as they are told to: a rank fails, a host cannot be reached, or all is well."""

    def __init__(self, *outcomes: tuple[str, int] | str | None):
        self.outcomes, self.hosts, self.failed_at = list(outcomes), [], []

    def start(self, names: Sequence[str], should_end, failed_at):
        self.hosts.append("".join(names))
        self.failed_at.append(failed_at)
        outcome = self.outcomes.pop(0)
        if outcome is None:
            return Ended(), 0
        if isinstance(outcome, str):
            raise UnreachableError(f"The host {outcome} cannot be reached.", outcome)
        host, code = outcome
        return Ended((list(names).index(host), code), 17.5), code

    def run(self, **options) -> int:
        options = {"max_restarts": 9, "exclude_after": 2} | options
        return run_with_restarts(
            self.start, THREE, 2, 4, longest_delay=0.0, discovery=None, **options
        )


@pytest.mark.parametrize(
    ("outcomes", "hosts", "said"),
    [
        (
            [("a", 1), ("a", 1), None],
            ["aabb", "aabb", "bbcc"],
            "a is excluded from now on: its ranks",
        ),
        ([("a", 1), ("b", 1), None], ["aabb", "aabb", "aabb"], ""),
        (["b", None], ["aabb", "aacc"], "b is excluded from now on: it cannot be reached"),
        ([("b", PERSISTENT_FAULT), None], ["aabb", "aacc"], "computed a wrong result"),
        (
            [("b", 1), ("b", 1), ("a", 1), ("a", 1), None],
            ["aabb", "aabb", "aacc", "aacc", "cc"],
            "",
        ),
    ],
)
def test_a_host_that_failed_twice_or_is_not_there_is_left_out(outcomes, hosts, said, capsys):
    runs = Runs(*outcomes)
    assert runs.run() == 0
    assert runs.hosts == hosts
    assert said in capsys.readouterr().err
    # Ranks are told since when the job was down.
    assert runs.failed_at[0] is None
    if isinstance(outcomes[0], tuple):
        assert set(runs.failed_at[1:]) == {17.5}


def test_too_few_hosts_end_the_job(capsys):
    runs = Runs("a", "b", ("c", 7), ("c", 7))
    assert runs.run() == 7
    assert runs.hosts == ["aabb", "bbcc", "cc", "cc"]
    assert "have 0 slots, and at least 2 ranks are required" in capsys.readouterr().err


def test_without_it_no_host_is_left_out():
    runs = Runs(("a", 1), ("a", 1), ("a", 1), None)
    assert runs.run(exclude_after=None) == 0
    assert runs.hosts == ["aabb"] * 4
    with pytest.raises(UnreachableError):
        Runs("a").run(exclude_after=None)
    # A broken machine would do it again.
    runs = Runs(("a", PERSISTENT_FAULT))
    assert runs.run(exclude_after=None) == PERSISTENT_FAULT
