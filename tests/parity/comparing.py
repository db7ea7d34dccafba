"""Ranks against one process, where sums in another order may end elsewhere.

Where ranks are not equal to one process to the first tolerance, one process is run again with the
rows of each batch in other orders. Ranks may differ by a few times the most that this changes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tests.parity.feeding import ORDERS, Feed, Result
from tests.strategies import programs

__all__ = ["allowed", "apart", "check", "differences", "noise", "reference"]

TOLERANCE, TIMES = 1e-5, 3


@functools.cache
def reference(one_process, program, feed: Feed) -> Result:
    """What one process of plain Keras gives."""
    expected = one_process.run(programs.in_one_process, program, feed, timeout=240)[0]
    for value in numbers(expected):
        assert np.isfinite(value).all(), "the program itself ends in NaN"
    return expected


def numbers(result: Result) -> list[np.ndarray]:
    parts = (result.weights, result.history, result.evaluation)
    return [np.asarray(value, "float64") for value in tf.nest.flatten(parts)]


def apart(one, other) -> float:
    """The largest difference of two nests of arrays."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0)) for a, b in pairs)


def allowed(
    found: float, first: float, others: Callable[[], Iterable[float]], *, times: int = TIMES
) -> float:
    """How far ranks may be from one process.

    Args:
        found: How far they are.
        first: The tolerance of equal sums.
        others: Makes the differences that other orders of the rows have from the given one, in one
            process; called where ranks do not keep to the first tolerance.
        times: How many times the most of these is allowed.

    Returns:
        The first tolerance, or a few times what other orders change where that is more.
    """
    return first if found <= first else max(first, times * max(others()))


def differences(result: Result, expected: Result) -> float:
    """The largest difference of weights, logs and evaluation."""
    return apart(numbers(result), numbers(expected))


@functools.cache
def noise(one_process, program, feed: Feed) -> float:
    """The largest difference that another order of the rows makes in one process."""
    expected = reference(one_process, program, feed)
    others = [dataclasses.replace(feed, order=order) for order in ORDERS if order != feed.order]
    return max(differences(reference(one_process, program, x), expected) for x in others)


def check(pool, one_process, program, feed: Feed, *, limit: float = 1e-4) -> None:
    """All ranks end as one process does.

    Args:
        pool: The ranks.
        one_process: The process to compare with.
        program: A function of a strategy and a feed.
        feed: How the rows come.
        limit: What another order of the rows may change at most: programs that it changes more
            prove nothing.
    """
    expected = reference(one_process, program, feed)
    results = pool.run(programs.on_rank, program, feed, timeout=240)
    try:
        programs.assert_same(results, expected, weights=TOLERANCE, logs=TOLERANCE)
        return
    except AssertionError:
        measured = noise(one_process, program, feed)
    assert measured < limit, f"another order of the rows alone changes this by {measured:.1e}"
    allowed = TOLERANCE + TIMES * measured
    programs.assert_same(results, expected, weights=allowed, logs=allowed)
