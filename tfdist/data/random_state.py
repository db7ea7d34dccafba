"""The state of the random generators of a training program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Private: the public `tf.compat.v1.get_seed` draws the seed of an operation in each call, and the number of
# drawn seeds is not public. tests/strategies/test_randomness.py fails if this changes.
from tensorflow.python.eager import context

from tfdist.collectives import Group
from tfdist.collectives.objects import broadcast_object


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


def operation_seeds() -> random.Random:
    """TensorFlow's generator of the seeds of operations, for a global seed, which its state depends on.

    `Dataset.shuffle` without a seed draws one when it is called, and so do random operations.
    """
    return context.context()._rng


def share_random_state(group: Group) -> None:
    """Broadcasts the random state of the group's first rank: that of Python, NumPy and TensorFlow.

    Initializers, `fit(shuffle=True)` and `Dataset.shuffle` then draw the same numbers on all ranks, whether or
    not the user has set a seed, and regardless of earlier draws on single ranks. If TensorFlow has no global
    seed, the first rank draws one.
    """
    if group.size == 1:
        return
    state = None
    if group.rank == 0:
        seed = global_seed()
        if seed is None:
            seed = random.SystemRandom().randrange(2**31)
            tf.random.set_seed(seed)
        state = random_state(), seed, operation_seeds().getstate()
    drawn_from, seed, operations = broadcast_object(state, group, name="random-state")
    set_random_state(drawn_from)
    if global_seed() != seed:
        tf.random.set_seed(seed)
    operation_seeds().setstate(operations)
