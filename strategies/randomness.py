"""The random state, which all ranks share: equal shuffling and equal initial weights."""

from __future__ import annotations

import random

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.objects import broadcast_object
from tfdist.data.random_state import (
    global_seed,
    operation_seeds,
    random_state,
    set_operation_seeds,
    set_random_state,
)


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
        state = random_state(), seed, operation_seeds()
    drawn_from, seed, operations = broadcast_object(state, group, name="random-state")
    set_random_state(drawn_from)
    if global_seed() != seed:
        tf.random.set_seed(seed)
    set_operation_seeds(operations)
