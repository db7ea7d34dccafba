"""The state of the random generators of a training program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

# Private: the public `tf.compat.v1.get_seed` draws the seed of an operation in each call, and the number of
# drawn seeds is not public. tests/strategies/test_randomness.py fails if this changes.
from tensorflow.python.eager import context


def random_state() -> dict[str, Any]:
    """Python's and NumPy's random state, JSON-serializable."""
    version, python, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(python), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a result of `random_state`."""
    version, python, gauss = state["python"]
    random.setstate((version, tuple(python), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the random state on exit."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None if none is set."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


def operation_seeds() -> tuple:
    """The state of TensorFlow's generator of the seeds of operations, for a global seed.

    `Dataset.shuffle` without a seed draws one when it is called, and so do random operations.
    """
    return context.context()._rng.getstate()


def set_operation_seeds(state: tuple) -> None:
    """Restores a result of `operation_seeds`; the global seed must be the same."""
    context.context()._rng.setstate(state)
