"""Hosts, their slots, and when a job is to move."""

from __future__ import annotations

import pytest

from tfdist.launch.run.hosts import Host, assign_hosts, is_this_machine, parse_host, should_restart


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1", Host("node1", 1)),
        ("10.0.0.7:16", Host("10.0.0.7", 16)),
        ("node1:0", None),
        ("node1:two", None),
        ("", None),
    ],
)
def test_how_a_host_is_written(text, found):
    assert parse_host(text) == found


def test_the_first_hosts_are_filled_first():
    hosts = [Host("a", 2), Host("b", 1), Host("a", 1)]
    assert assign_hosts(hosts, 3) == ["a", "a", "a"]
    assert assign_hosts(hosts, 9) == ["a", "a", "a", "b"]


def test_this_machine_by_its_names():
    assert is_this_machine("localhost") and not is_this_machine("elsewhere.example")


@pytest.mark.parametrize(
    ("hosts", "most", "expected"),
    [
        ([Host("a", 2), Host("b", 1)], 3, False),
        ([Host("b", 2), Host("a", 2)], 3, False),  # Another order moves nobody.
        ([Host("a", 2), Host("b", 2)], 4, True),  # Room for one more.
        ([Host("a", 2), Host("b", 2)], 3, False),  # More room than is wanted.
        ([Host("a", 2), Host("c", 1)], 3, True),  # One has gone.
        ([Host("a", 1), Host("b", 1)], 3, True),
        ([], 3, False),  # Nowhere to go.
    ],
)
def test_when_a_job_moves(hosts, most, expected):
    assert should_restart(["a", "a", "b"], hosts, most) is expected
