"""The state of the sources of chance that a program draws from while it trains."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

# Private: what is public (`tf.compat.v1.get_seed`) draws the seed of an operation whenever it is asked, and
# nothing public says how many were drawn. tests/strategies/test_randomness.py fails where they move.
from tensorflow.python.eager import context


def random_state() -> dict[str, Any]:
    """Python's and NumPy's random state, as JSON can hold it."""
    version, python, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(python), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts back what `random_state` returned."""
    version, python, gauss = state["python"]
    random.setstate((version, tuple(python), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """What is drawn inside does not count outside."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None where none is set."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


def operation_seeds() -> tuple:
    """From where TensorFlow draws the next seeds of operations, where a global seed is set.

    `Dataset.shuffle` without a seed draws one when it is called, and so do random operations.
    """
    return context.context()._rng.getstate()


def set_operation_seeds(state: tuple) -> None:
    """Puts back what `operation_seeds` returned; the global seed is the same as then."""
    context.context()._rng.setstate(state)
