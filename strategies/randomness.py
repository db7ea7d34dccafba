"""One source of chance: ranks that draw alike shuffle alike and start from the same weights."""

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
    """Gives every rank the random state of the group's first: Python's, NumPy's, TensorFlow's.

    Initializers, `fit(shuffle=True)` and `Dataset.shuffle` then draw the same on all ranks,
    whether or not the user set a seed, and whatever one of them has drawn alone. TensorFlow without
    a global seed gets one, drawn by the first rank.
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
