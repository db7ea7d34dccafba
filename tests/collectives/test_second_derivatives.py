"""Gradients of gradients of collectives: of the sum of all ranks' losses, as in one process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks

#: The rows that a rank sends to the others, on two ranks.
SPLITS = [[1, 3], [2, 2]]


def derivatives(loss: Callable, parts: list) -> list:
    """The first three derivatives by tensors of functions made of a loss: of each order, one for each tensor."""
    with tf.GradientTape() as outermost:
        outermost.watch(parts)
        with tf.GradientTape() as outer:
            outer.watch(parts)
            with tf.GradientTape() as inner:
                inner.watch(parts)
                value = loss(*parts)
            first = inner.gradient(value, parts, unconnected_gradients="zero")
            each = zip(first, parts, strict=True)
            penalty = tf.add_n([tf.reduce_sum(d**2 * tf.cos(x)) for d, x in each])
        second = outer.gradient(penalty, parts)
        penalty = tf.add_n([tf.reduce_sum(d**2) for d in second])
    return [first, second, outermost.gradient(penalty, parts)]


def in_one_process(kind: str, a, b) -> tuple:
    """What a collective returns on either of two ranks."""
    whole = {
        "sum": lambda: a + b,
        "mean": lambda: (a + b) / 2,
        "max": lambda: tf.maximum(a, b),
        "all_gather": lambda: tf.concat([a, b], 1),
        "all_gather_uneven": lambda: tf.concat([a[:1], b[:2]], 0),
        "broadcast": lambda: b,
    }
    if kind in whole:
        return whole[kind](), whole[kind]()
    if kind == "reduce_scatter":
        return tuple(tf.split(a + b, 2))
    if kind == "send_recv":
        return a**2, a * b
    splits = SPLITS if kind == "all_to_all_uneven" else [[2, 2], [2, 2]]
    sent = [tf.split(x, sizes) for x, sizes in zip((a, b), splits, strict=True)]
    return tuple(tf.concat([sent[0][rank], sent[1][rank]], 0) for rank in range(2))


def on_this_rank(kind: str, x, group):
    """The same of the collective, from the tensor of this rank."""
    from tfdist import collectives as c

    first = group.rank == 0
    return {
        "sum": lambda: c.all_reduce(x, group),
        "mean": lambda: c.all_reduce(x, group, "mean"),
        "max": lambda: c.all_reduce(x, group, "max"),
        "all_gather": lambda: c.all_gather(x, group, 1),
        "all_gather_uneven": lambda: c.all_gather(x[: group.rank + 1], group, uneven=True),
        "broadcast": lambda: c.broadcast(x, group, 1),
        "reduce_scatter": lambda: c.reduce_scatter(x, group),
        "all_to_all": lambda: c.all_to_all(x, group),
        "all_to_all_uneven": lambda: c.all_to_all(x, group, SPLITS[group.rank])[0],
        "send_recv": lambda: c.send(x, group, 1) ** 2 if first else c.recv(x, group, 0) * x,
    }[kind]()


KINDS = (
    *("sum", "mean", "max", "all_gather", "all_gather_uneven", "broadcast"),
    *("reduce_scatter", "all_to_all", "all_to_all_uneven", "send_recv"),
)


def wrong_collectives() -> list[str]:
    """The collectives with other derivatives than in one process."""
    from tfdist import Mesh
    from tfdist.testing import engine

    group = engine(Mesh(data=-1)).group()
    random = np.random.default_rng(0)
    parts = [tf.constant(random.normal(size=(4, 3))) for _ in range(2)]
    wrong = []

    def weighed(y, rank):
        rows = tf.range(tf.shape(y)[0], dtype=tf.int32)[:, None]
        return tf.reduce_sum(tf.sin(y) * tf.cast(rows + 1 + rank, y.dtype))

    for kind in KINDS:

        def of_all(a, b, kind=kind):
            return tf.add_n([weighed(y, r) for r, y in enumerate(in_one_process(kind, a, b))])

        def of_this(x, kind=kind):
            return weighed(on_this_rank(kind, x, group), group.rank)

        right = [both[group.rank] for both in derivatives(of_all, parts)]
        for mode in ("eager", "graph"):
            derive = tf.function(derivatives) if mode == "graph" else derivatives
            found = derive(of_this, [parts[group.rank]])
            for order, ((got,), expected) in enumerate(zip(found, right, strict=True), 1):
                if not np.allclose(got, expected, rtol=1e-10, atol=1e-10):
                    wrong.append(f"{kind} {mode}, derivative {order}")
    return wrong


def wrong_mappings() -> list[str]:
    """The pairs of tensor parallelism, of which every rank computes a part, with the same loss."""
    from tfdist import Mesh
    from tfdist.collectives import mappings as m
    from tfdist.collectives import reduce_scatter
    from tfdist.testing import engine

    group = engine(Mesh(data=1, tensor=-1)).group("tensor")
    random = np.random.default_rng(0)
    whole = [tf.constant(random.normal(size=size)) for size in ((3, 4, 6), (6, 8), (8, 6))]
    x, up, down = whole
    own = [x, tf.split(up, 2, 1)[group.rank], tf.split(down, 2, 0)[group.rank]]

    def of_a_slice(x, up, down):
        part = m.scatter_to_region(x, group, 1)
        hidden = tf.tanh(m.column_parallel_matmul(part, up, group, 1))
        return m.gather_from_region(reduce_scatter(m.linear(hidden, down), group, axis=1), group, 1)

    def gathered(x, up, down):
        hidden = tf.tanh(m.column_parallel_matmul(x, up, group))
        hidden = m.scatter_to_region(m.gather_from_region(hidden, group), group)
        return m.reduce_from_region(m.linear(hidden, down), group)

    def separate(x, up, down):
        hidden = tf.tanh(m.linear(m.copy_to_region(x, group), up))
        return m.reduce_from_region(m.linear(hidden, down), group)

    def right(x, up, down):
        return tf.matmul(tf.tanh(tf.matmul(x, up)), down)

    def loss(function):
        return lambda *args: tf.reduce_sum(tf.sin(function(*args)))

    def by_input(function):
        """A gradient penalty: by the weights, of the gradient by the input."""

        def penalty(x, up, down):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(function)(x, up, down)
            return value + tf.reduce_sum(tape.gradient(value, x) ** 2 * tf.cos(x))

        def derive(x, up, down):
            with tf.GradientTape() as tape:
                tape.watch([x, up, down])
                value = penalty(x, up, down)
            return tape.gradient(value, [x, up, down])

        return derive

    of_x, of_up, of_down = by_input(right)(*whole)
    expected = [of_x, tf.split(of_up, 2, 1)[group.rank], tf.split(of_down, 2, 0)[group.rank]]
    wrong = []
    for function in (separate, gathered, of_a_slice):
        for mode in ("eager", "graph"):
            derive = by_input(function)
            found = (tf.function(derive) if mode == "graph" else derive)(*own)
            for name, got, value in zip(("x", "up", "down"), found, expected, strict=True):
                if not np.allclose(got, value, rtol=1e-10, atol=1e-10):
                    wrong.append(f"{function.__name__} {mode} {name}")
    return wrong


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("check", [wrong_collectives, wrong_mappings], ids=lambda f: f.__name__)
def test_derivatives_of_any_order_are_those_of_one_process(pool, check):
    assert pool.run(check) == [[], []]
