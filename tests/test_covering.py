"""The cases that are taken of a long matrix leave no value, or no pair of values, out."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import choose

VALUES = {"engine": "ht", "optimizer": "sam", "program": "abcdef", "stage": "123"}
CASES = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def pairs(cases) -> set:
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


@pytest.mark.parametrize("covered", [[], CASES[:7]])
def test_each_pair_is_there_in_far_fewer_cases(covered):
    chosen = [CASES[number] for number in choose(CASES, covered, 2)]
    assert pairs([*chosen, *covered]) == pairs(CASES)
    assert len(chosen) < len(CASES) / 4


def test_each_value_is_there_in_fewer_still():
    chosen = [CASES[number] for number in choose(CASES, [], 1)]
    for name, values in VALUES.items():
        assert {case[name] for case in chosen} == set(values)
    assert len(chosen) == 6


def test_of_two_parameters_each_value_is_there():
    cases = [{"pool": pool, "script": script} for pool in "ab" for script in "uvwxyz"]
    chosen = [cases[number] for number in choose(cases, [], 2)]
    assert {case["script"] for case in chosen} == set("uvwxyz")
    assert {case["pool"] for case in chosen} == set("ab")
    assert len(chosen) == 6


def test_a_parameter_with_one_value_does_not_count():
    cases = [{"pool": "a", "script": script, "lora": lora} for script in "uvwxyz" for lora in "ba"]
    chosen = [cases[number] for number in choose(cases, [cases[0]], 2)]
    assert {case["script"] for case in chosen} == set("vwxyz")
    assert {case["lora"] for case in chosen} | {"b"} == set("ba")
    assert len(chosen) <= 6


def test_what_runs_anyway_is_not_chosen_again():
    assert choose(CASES, CASES, 2) == choose([], [], 1) == []
