"""The cases that are chosen of a long cross include each test and each value."""

from __future__ import annotations

import itertools

from tests.covering import choose

VALUES = {"test": "uv", "engine": "ht", "optimizer": "sam", "program": "abcdef", "stage": "123"}
CASES = [set(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def test_each_value_is_there():
    for first in (0, 17, 71):
        chosen = choose(CASES, [], first)
        assert set().union(*(CASES[number] for number in chosen)) == set().union(*CASES)
        assert len(chosen) == 6


def test_other_cases_come_first_of_equal_ones():
    assert choose(CASES, [], 0) != choose(CASES, [], 17)


def test_values_of_one_test_count_for_the_others_of_the_file():
    cases = [
        {("test", test), ("engine", engine), ("stage", stage)}
        for test in "uv"
        for engine in "ht"
        for stage in "12"
    ]
    chosen = [cases[number] for number in choose(cases, [])]
    assert len(chosen) == 2
    assert set().union(*chosen) == set().union(*cases)


def test_what_runs_anyway_is_not_chosen_again():
    assert choose(CASES, CASES) == choose([], []) == []
