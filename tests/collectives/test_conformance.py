"""Every collective, dtype, size and kind of group against NumPy, eagerly and in a graph."""

from __future__ import annotations

import pytest

from tests.conftest import on_ranks, slow_but

ENGINES = ("horovod", "tensorflow")
#: Four ranks hold groups of two as well.
KINDS = [(engine, 4) for engine in ENGINES]
FEWER = [(engine, size) for engine in ENGINES for size in (2, 3)]
QUICK_FEWER = ("tensorflow", 3)
DTYPES = ["float32", "bfloat16", "bool", "float16", "int32", "int64"]
OPERATIONS = [
    "all_reduce",
    "all_gather",
    "all_gather_uneven",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_uneven",
    "broadcast",
    "send_recv",
]


def conformance(operation: str, by_engine: bool, dtypes: list[str]) -> list[str]:
    """Runs on each rank; returns what differs from NumPy.

    Args:
        operation: Which collective.
        by_engine: Whether the engine's own operation is tried where messages could go directly.
        dtypes: For which dtypes.
    """
    from functools import partial

    import ml_dtypes
    import numpy as np
    import tensorflow as tf

    from tfdist import Mesh, collectives
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine

    size = engine().size
    mesh = Mesh(data=2, tensor=2) if size == 4 else Mesh()
    if operation == "send_recv" and size > 2:
        mesh = Mesh(data=1, pipeline=-1)
    world = engine(mesh)
    if by_engine:
        world.enabled = False
    elif world.name == "horovod" and not isinstance(world, P2PEngine):
        return ["there are no peer-to-peer messages: was tfdist-install-horovod run?"]
    axes = [("data",), ("tensor",), ("data", "tensor")] if size == 4 else [("data",)]
    if operation == "send_recv" and size > 2:
        axes = [("pipeline",)]
    shapes = [(0,), (1,), (7,), (3, 5), (20_011,), (), (2, 0, 3), (100_003,)]
    wrong: list[str] = []

    def value(rank, dtype, shape):
        random = np.random.default_rng([rank, len(shape), sum(shape)])
        if dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        # Small whole numbers: their sums are exact in every dtype, in whatever order.
        return random.integers(-8, 9, shape).astype(kind)

    cases: list[tuple] = []

    def check(what, call, argument, expected):
        cases.append((what, call, tf.constant(argument), expected))

    def run_cases():
        def in_graph(arguments):
            return [call(x) for (_, call, _, _), x in zip(cases, arguments, strict=True)]

        arguments = [argument for _, _, argument, _ in cases]
        eager = in_graph(arguments)
        # All in one function: many collectives of one graph are then under way at a time.
        for mode, outputs in (("eager", eager), ("graph", tf.function(in_graph)(arguments))):
            for (what, _, _, expected), got in zip(cases, outputs, strict=True):
                for part, right in zip(
                    tf.nest.flatten(got), tf.nest.flatten(expected), strict=True
                ):
                    part = part.numpy()
                    kind = (part.dtype, part.shape)
                    if kind != (right.dtype, np.shape(right)):
                        wrong.append(f"{what} {mode}: {kind}, not {right.dtype}{np.shape(right)}")
                    elif not np.array_equal(part, right):
                        wrong.append(f"{what} {mode}: values differ")
        cases.clear()

    for names in axes:
        group = world.group(*names)
        n, me = group.size, group.rank
        for dtype in dtypes:
            # Scalars and empty inner dims take the same paths in every dtype.
            for shape in shapes if dtype == "float32" else shapes[:5]:
                what = f"{'+'.join(names)} {dtype}{shape}"
                if operation == "all_reduce":
                    parts = np.stack([value(r, dtype, shape) for r in group.ranks])
                    for reduction in ("sum", "mean", "max", "min"):
                        if dtype == "bool" and reduction in ("sum", "mean"):
                            continue
                        if reduction == "mean" and dtype.startswith("int"):
                            continue
                        wide = parts.astype("float64") if "float" in dtype else parts
                        right = getattr(wide, reduction)(axis=0).astype(parts.dtype)
                        if reduction == "mean" and n == 3:
                            continue  # Thirds are not exact; sums and halves show the same path.
                        check(
                            f"{what} {reduction}",
                            partial(collectives.all_reduce, group=group, reduction=reduction),
                            parts[me],
                            right,
                        )
                elif operation == "all_gather":
                    for axis in range(len(shape)):
                        parts = [value(r, dtype, shape) for r in group.ranks]
                        check(
                            f"{what} axis {axis}",
                            partial(collectives.all_gather, group=group, axis=axis),
                            parts[me],
                            np.concatenate(parts, axis),
                        )
                elif operation == "all_gather_uneven" and shape:
                    # Place p of the group brings p rows, so the first brings none.
                    parts = [value(r, dtype, (p, *shape[1:])) for p, r in enumerate(group.ranks)]
                    check(
                        what,
                        partial(collectives.all_gather, group=group, uneven=True),
                        parts[me],
                        np.concatenate(parts),
                    )
                elif operation == "reduce_scatter" and shape:
                    rows = 3 * n
                    parts = np.stack([value(r, dtype, (rows, *shape[1:])) for r in group.ranks])
                    for reduction in ("sum", "max", "min"):
                        if dtype == "bool" and reduction == "sum":
                            continue
                        wide = parts.astype("float64") if "float" in dtype else parts
                        right = getattr(wide, reduction)(axis=0).astype(parts.dtype)
                        check(
                            f"{what} {reduction}",
                            partial(collectives.reduce_scatter, group=group, reduction=reduction),
                            parts[me],
                            right[3 * me : 3 * me + 3],
                        )
                elif operation == "all_to_all" and shape:
                    parts = [value(r, dtype, (2 * n, *shape[1:])) for r in group.ranks]
                    right = np.concatenate([part[2 * me : 2 * me + 2] for part in parts])
                    check(what, partial(collectives.all_to_all, group=group), parts[me], right)
                elif operation == "all_to_all_uneven" and shape:
                    # Place p sends (p + q) % 3 rows to place q.
                    splits = np.array([[(p + q) % 3 for q in range(n)] for p in range(n)], "int32")
                    parts = [
                        value(r, dtype, (int(splits[p].sum()), *shape[1:]))
                        for p, r in enumerate(group.ranks)
                    ]
                    starts = np.cumsum(splits, axis=1) - splits
                    right = np.concatenate(
                        [parts[p][starts[p, me] : starts[p, me] + splits[p, me]] for p in range(n)]
                    )
                    check(
                        what,
                        partial(collectives.all_to_all, group=group, splits=splits[me]),
                        parts[me],
                        (right, splits[:, me]),
                    )
                elif operation == "broadcast":
                    for root in (0, n - 1):
                        parts = [value(r, dtype, shape) for r in group.ranks]
                        check(
                            f"{what} root {root}",
                            partial(collectives.broadcast, group=group, root=root),
                            parts[me],
                            parts[root],
                        )
                elif operation == "send_recv":
                    parts = [value(r, dtype, shape) for r in group.ranks]
                    # Along a chain, as pipeline stages do; then from the last to the first.
                    for source, target in [
                        *zip(range(n - 1), range(1, n), strict=True),
                        (n - 1, 0),
                    ]:
                        if me == source:
                            check(
                                what,
                                partial(collectives.send, group=group, to=target),
                                parts[me],
                                parts[me],
                            )
                        if me == target:
                            check(
                                what,
                                partial(collectives.recv, group=group, source=source),
                                np.zeros_like(parts[me]),
                                parts[source],
                            )
            run_cases()
    world.enabled = True
    return wrong


@on_ranks(KINDS[0], slow=KINDS[1:])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_equals_numpy(pool, operation):
    check_operation(pool, operation)


@pytest.mark.slow
@on_ranks(*KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_equals_numpy_in_other_dtypes(pool, operation):
    check_operation(pool, operation, dtypes=DTYPES[1:])


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize(
    "operation", slow_but(["all_reduce", "all_gather_uneven", "send_recv"], OPERATIONS)
)
def test_operation_of_horovod_itself_equals_numpy(pool, operation):
    check_operation(pool, operation, by_engine=True)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_of_horovod_itself_equals_numpy_in_other_dtypes(pool, operation):
    check_operation(pool, operation, by_engine=True, dtypes=DTYPES[1:])


@pytest.mark.slow
@on_ranks(QUICK_FEWER)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_equals_numpy_on_three_ranks(pool, operation):
    check_operation(pool, operation)


@pytest.mark.slow
@on_ranks(*FEWER)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_equals_numpy_on_fewer_ranks(pool, operation):
    check_operation(pool, operation, dtypes=DTYPES)


def sum_of_a_constant(by_engine: bool) -> list[float]:
    """Sums to which one rank brings a constant and the others what they are given."""
    import tensorflow as tf

    from tfdist import collectives
    from tfdist.testing import engine

    world = engine()
    if by_engine:
        world.enabled = False

    @tf.function
    def total(x):
        own = tf.ones([3]) if world.rank == 0 else x
        return collectives.all_reduce(own, world.group(), name="of-a-constant")

    found = [float(total(tf.fill([3], float(step)))[0]) for step in range(3)]
    world.enabled = True
    return found


@on_ranks(KINDS[0], slow=KINDS[1:])
@pytest.mark.parametrize("by_engine", [False, True], ids=["directly", "by engine"])
def test_a_constant_takes_part_in_each_run(pool, by_engine):
    assert pool.run(sum_of_a_constant, by_engine, timeout=60) == [[1.0, 4.0, 7.0]] * 4


def check_operation(pool, operation, by_engine=False, dtypes=DTYPES[:1]):
    answers = pool.run(conformance, operation, by_engine, dtypes, timeout=240)
    for rank, wrong in enumerate(answers):
        assert not wrong, f"rank {rank}: {wrong[:10]}"


def meet_at_a_barrier() -> tuple[float, float, str]:
    """When this rank came and when it left, and what a barrier in a graph says."""
    import time

    import tensorflow as tf

    from tfdist.collectives import barrier
    from tfdist.testing import engine

    group = engine().group()
    barrier(group)
    time.sleep(0.5 * engine().rank)
    came = time.monotonic()
    barrier(group)
    left = time.monotonic()
    try:
        tf.function(lambda: barrier(group))()
    except RuntimeError as error:
        return came, left, str(error)
    return came, left, ""


@on_ranks(("tensorflow", 2), slow=[("horovod", 2), ("horovod", 3)])
def test_a_barrier(pool):
    found = pool.run(meet_at_a_barrier, timeout=60)
    assert min(left for _, left, _ in found) >= max(came for came, _, _ in found)
    assert all("outside of tf.function" in said for *_, said in found)
