"""One source of chance: ranks that draw alike shuffle alike and start from the same weights."""

from __future__ import annotations

import random

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.objects import broadcast_object
from tfdist.data.random_state import global_seed

__all__ = ["share_random_state"]


def share_random_state(group: Group) -> None:
    """Gives every rank the random state of the group's first: Python's, NumPy's, TensorFlow's.

    Initializers, `fit(shuffle=True)` and `Dataset.shuffle` then draw the same on all ranks,
    whether or not the user set a seed. TensorFlow without a global seed gets one, drawn by the
    first rank.
    """
    if group.size == 1:
        return
    state = None
    if group.rank == 0:
        seed = global_seed()
        state = (
            random.getstate(),
            np.random.get_state(),
            seed if seed is not None else random.SystemRandom().randrange(2**31),
        )
    python, numpy, seed = broadcast_object(state, group, name="random-state")
    random.setstate(python)
    np.random.set_state(numpy)
    if global_seed() != seed:
        tf.random.set_seed(seed)
