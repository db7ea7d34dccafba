"""The cases that are taken of a long cross leave no value out."""

from __future__ import annotations

import itertools

from tests.covering import choose

VALUES = {"engine": "ht", "optimizer": "sam", "program": "abcdef", "stage": "123"}
CASES = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def test_each_value_is_there():
    chosen = [CASES[number] for number in choose(CASES, [])]
    for name, values in VALUES.items():
        assert {case[name] for case in chosen} == set(values)
    assert len(chosen) == 6


def test_a_parameter_with_one_value_does_not_count():
    cases = [{"pool": "a", "script": script, "lora": lora} for script in "uvwxyz" for lora in "ba"]
    chosen = [cases[number] for number in choose(cases, [cases[0]])]
    assert {case["script"] for case in chosen} == set("vwxyz")
    assert {case["lora"] for case in chosen} | {"b"} == set("ba")
    assert len(chosen) <= 6


def test_what_runs_anyway_is_not_chosen_again():
    assert choose(CASES, CASES) == choose([], []) == []
