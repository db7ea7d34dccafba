"""What ranks tell each other, by the functions that layers and strategies are made of.

    python examples/collectives.py
    tfdist-run -np 2 -- python examples/collectives.py

Each rank holds its part of the numbers from 0 to 11. The functions work inside and outside of `tf.function`, on any
axis of the mesh, and have gradients.
"""

import numpy as np
import tensorflow as tf

import tfdist
from tfdist.collectives import all_gather, all_reduce, barrier, broadcast

strategy = tfdist.strategies.auto()
group = strategy.group("data")
part = tf.constant(np.array_split(np.arange(12.0), group.size)[strategy.mesh.rank])


@tf.function
def exchange(part):
    """The sum of all numbers, all of them in the order of ranks, and the first rank's smallest."""
    total = all_reduce(tf.reduce_sum(part), group, "sum")
    every = all_gather(part, group)
    smallest = broadcast(tf.reduce_min(part), group, root=0)
    return total, every, smallest


total, every, smallest = exchange(part)
barrier(group)  # All have come here.
if strategy.is_chief:
    print(f"Everything: {every.numpy().astype(int)}")
    print(f"Sum {total:.1f}, smallest {smallest:.1f}, on {group.size} rank(s).")
