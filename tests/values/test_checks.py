"""The checks themselves: what is right comes back as plain Python, what is wrong is told in one line."""

from __future__ import annotations

import fractions
import pathlib
import random

import numpy as np
import pytest

from tests.values.bad_values import EVERY
from tfdist.utils import checks


class Hostile:
    """Does what no value should do when it is looked at."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")

    def __len__(self):
        raise RuntimeError("no len")

    def __iter__(self):
        raise RuntimeError("no iter")

    __hash__ = None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (checks.integer("n", np.int64(3)), 3),
        (checks.integer("n", np.uint8(3), minimum=3, maximum=3), 3),
        (checks.integer("n", None, optional=True), None),
        (checks.number("n", np.float32(0.5)), 0.5),
        (checks.number("n", 3), 3),
        (checks.number("n", fractions.Fraction(1, 2), above=0), 0.5),
        (checks.boolean("n", np.True_), True),
        (checks.path("n", pathlib.Path("a/b")), "a/b"),
        (checks.integers("n", np.array([1, 2])), (1, 2)),
        (checks.integers("n", [None, 2], none=True), (None, 2)),
        (checks.integers("n", (), empty=True), ()),
        (checks.numbers_of("n", (1, 2.5), minimum=0), (1, 2.5)),
        (checks.one_of("n", "a", ("a", "b")), "a"),
        (checks.text("n", "Käse"), "Käse"),
    ],
)
def test_what_is_right_comes_back_plain(found, expected):
    assert found == expected
    assert type(found) is type(expected)


def test_shapes_of_tensorflow_are_lists_of_integers():
    import tensorflow as tf

    assert checks.integers("n", tf.TensorShape([None, 3]), none=True) == (None, 3)


CHECKS = [
    lambda value: checks.integer("it", value, minimum=1, maximum=2),
    lambda value: checks.number("it", value, above=0, below=1e-9),
    lambda value: checks.boolean("it", value),
    lambda value: checks.text("it", value),
    lambda value: checks.one_of("it", value, ("x", "y")),
    lambda value: checks.path("it", value),
    lambda value: checks.instance("it", value, set, "a set"),
    lambda value: checks.function("it", value),
    lambda value: checks.integers("it", value, minimum=100),
    lambda value: checks.numbers_of("it", value, minimum=1e9),
    lambda value: checks.sequence("it", value, "things"),
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_wrong_is_one_line_with_the_name(check):
    draw = random.Random(7)
    values = [*EVERY.values(), Hostile(), np.ones([50, 50]), "a" * 10_000, np.array(3)]
    values += [draw.uniform(-1e300, 1e300) for _ in range(20)]
    refused = 0
    for value in values:
        try:
            check(value)
        except (ValueError, TypeError) as error:
            refused += 1
            text = str(error)
            assert text.startswith("`it` must be "), text
            assert f"Received: it={checks.shown(value)}." in text
            assert "\n" not in text
            assert len(text) < 300
    assert refused > len(values) // 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: checks.integer("n", 0, minimum=1), "an int of at least 1. Received: n=0."),
        (lambda: checks.integer("n", 4, minimum=0, maximum=3), "an int from 0 to 3."),
        (lambda: checks.integer("n", 2**31), "an int of at most 2147483647."),
        (lambda: checks.integer("n", True), "an int. Received: n=True."),
        (lambda: checks.integer("n", 0, minimum=1, also="None for all"), "1, or None for all."),
        (lambda: checks.number("n", 2, above=0, maximum=1), "above 0 and at most 1."),
        (lambda: checks.number("n", float("nan")), "a finite number. Received: n=nan."),
        (lambda: checks.one_of("n", 1.0, (1, 2)), "one of 1, 2. Received: n=1.0."),
        (
            lambda: checks.integers("n", [0], minimum=1),
            "a non-empty list or tuple of integers of at least 1.",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)
