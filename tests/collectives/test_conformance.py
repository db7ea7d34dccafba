"""Every collective, dtype, size and kind of group against NumPy, eagerly and in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.conftest import on_ranks, slow_but
from tfdist.testing.conformance import DTYPES, OPERATIONS, differences, sums_with_a_constant

ENGINES = ("horovod", "tensorflow")
#: Four ranks hold groups of two as well.
KINDS = [(engine, 4) for engine in ENGINES]
FEWER = [(engine, size) for engine in ENGINES for size in (2, 3)]
QUICK_FEWER = ("tensorflow", 3)


def conformance(operation: str, by_engine: bool, dtypes: Sequence[str]) -> list:
    """Runs on each rank; returns what differs from NumPy.

    Args:
        operation: Which collective.
        by_engine: Whether the engine's own operation is tried where messages could go directly.
        dtypes: For which dtypes.
    """
    from tfdist import Mesh
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
    wrong = differences(world, operation, dtypes)
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
    from tfdist.testing import engine

    world = engine()
    if by_engine:
        world.enabled = False
    found = sums_with_a_constant(world)
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
    assert all("outside tf.function" in said for *_, said in found)
