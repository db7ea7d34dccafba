"""Direct messages: who gets them, what is sent, and what happens when a rank goes."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

import pytest

from tests.conftest import needs_addon, on_ranks
from tfdist import Mesh
from tfdist.collectives.horovod import _cycle_ms
from tfdist.testing import RankPool


def sums_of_floats():
    """The bytes of a sum whose terms do not add up exactly, twice."""
    import numpy as np
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine()
    x = tf.constant(np.random.default_rng(world.rank).normal(size=50_001).astype("float32"))
    function = tf.function(lambda x: all_reduce(x, world.group()))
    return [function(x).numpy().tobytes() for _ in range(2)]


@on_ranks(("horovod", 4))
def test_sums_are_the_same_bits_on_all_ranks_and_each_time(pool):
    answers = pool.run(sums_of_floats, timeout=120)
    assert len({bits for answer in answers for bits in answer}) == 1


def bytes_sent_by_a_sum(elements: int, by_engine: bool):
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine
    from tfdist.testing.traffic import traffic

    world = engine()
    x = tf.ones([elements])
    all_reduce(x, world.group())
    before = traffic().sent
    world.enabled = not by_engine
    all_reduce(x, world.group())
    world.enabled = True
    return traffic().sent - before


@on_ranks(("horovod", 4))
@pytest.mark.parametrize("elements", [1, 1_000_000])
def test_a_sum_sends_the_fewest_bytes(pool, elements):
    # Shares go to 3 others, and then the sums of shares; what is small goes whole.
    expected = 3 * 4 * elements if elements == 1 else 2 * 3 * 4 * elements // 4
    assert pool.run(bytes_sent_by_a_sum, elements, False, timeout=120) == [expected] * 4


def sums_of_arrays_that_soon_end() -> bool:
    import numpy as np
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine()
    counted = tf.range(1 << 18, dtype=tf.float32)
    expected = counted.numpy() * sum(range(1, world.size + 1))

    @tf.function
    def repeated():
        # What is sent has no other holder here, and its place is wanted for the next.
        return [
            all_reduce(counted * float(world.rank + 1), world.group(), name=f"sent{number}")
            for number in range(20)
        ]

    return all(np.array_equal(result, expected) for result in repeated())


@on_ranks(("horovod", 2))
def test_what_is_sent_is_held_until_it_has_left(pool):
    assert pool.run(sums_of_arrays_that_soon_end, timeout=120) == [True] * 2


def functions_in_another_order() -> list[float]:
    """Two functions that TensorFlow does not inline, which each rank begins in an order of its own."""
    import time

    import tensorflow as tf

    from tfdist.backend.graph.separate import mark_separate
    from tfdist.backend.keras.functional import not_inlined
    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    group = engine().group()

    def later(x):
        time.sleep(0.3)
        return x

    def summed(name: str):
        @not_inlined
        def function(x):
            mark_separate(tf.compat.v1.get_default_graph())
            return all_reduce(x, group, name=name)

        return function

    functions = [summed(name) for name in "ab"]

    @tf.function
    def step(x):
        late = tf.ensure_shape(tf.py_function(later, [x], tf.float32), [])
        given = [x, late] if group.rank == 0 else [late, x]
        return tf.add_n([function(each) for function, each in zip(functions, given, strict=True)])

    return [float(step(tf.constant(1.0 + number))) for number in range(3)]


@on_ranks(("horovod", 2))
def test_a_function_that_is_not_inlined_is_in_the_step_of_its_caller(pool):
    answers = pool.run(functions_in_another_order, timeout=60)
    assert answers == [[4 * (1.0 + number) for number in range(3)]] * 2


@on_ranks(("horovod", 4))
def test_without_messages_sums_go_by_the_engine(pool):
    assert pool.run(bytes_sent_by_a_sum, 1000, True, timeout=120) == [0] * 4


def mebibytes_of_shares(count: int) -> float:
    """What this rank holds of so many reduced tensors of 4 MiB, of which it gets its shares."""
    import tensorflow as tf

    from tfdist.addons.monitoring.memory import bytes_in_use
    from tfdist.collectives import reduce_scatter
    from tfdist.testing import engine

    group = engine().group()

    @tf.function
    def shares(x):
        found: list[tf.Tensor] = []
        for number in range(count):
            with tf.control_dependencies(found[-1:]):
                whole = x * float(number + 1)
            found.append(reduce_scatter(whole, group, "mean", name=f"share{number}"))
        return found

    x = tf.ones([1 << 20])
    held = []
    for _ in range(3):
        before = bytes_in_use()
        found = shares(x)
        held.append((bytes_in_use() - before) / 2**20)
        del found
    return min(held)


@needs_addon("monitoring")
@on_ranks(("horovod", 2))
def test_a_share_does_not_keep_the_whole(pool):
    assert max(pool.run(mebibytes_of_shares, 16, timeout=120)) < 1.2 * 16 * 4 / 2


def transports_with_a_gpu() -> tuple[list[str], float]:
    """By whom a rank with a GPU would have sums of two dtypes done, without and with NCCL, and a sum that is."""
    import tensorflow as tf

    from tfdist.backend import devices
    from tfdist.collectives import all_reduce
    from tfdist.collectives.run import _transport
    from tfdist.testing import engine

    world, has_gpu, name = engine(), devices.has_gpu, devices.device_name
    devices.has_gpu, devices.device_name = (lambda: True), (lambda: "/CPU:0")
    inner = world.inner
    try:
        found = []
        for inner._by_nccl in (False, True):
            for dtype in (tf.float32, tf.int32):
                transport, on_host = _transport("all_reduce", world.group(), dtype)
                found.append(f"{transport.lane}, {'host' if on_host else 'device'}")
        return found, float(all_reduce(tf.constant(2), world.group()))
    finally:
        inner._by_nccl = False
        devices.has_gpu, devices.device_name = has_gpu, name


@on_ranks(("horovod", 2))
def test_messages_between_hosts_serve_what_stays_on_the_host_of_a_gpu(pool):
    for lanes, total in pool.run(transports_with_a_gpu, timeout=120):
        assert lanes == [
            "peer to peer, host",
            "peer to peer, host",
            "horovod, device",
            "peer to peer, host",
        ]
        assert total == 4.0


def hide_the_library_from(rank: int):
    """Makes an engine while one rank finds no library; what is logged meanwhile."""
    import logging
    import os
    import types

    import tensorflow as tf

    import tfdist.collectives.p2p.connections as connections
    from tfdist.collectives import all_reduce
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine

    if int(os.environ["HOROVOD_RANK"]) == rank:
        connections.TRANSPORT = types.SimpleNamespace(find=lambda: None)
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tfdist").addHandler(handler)
    world = engine()
    return (
        not isinstance(world, P2PEngine),
        float(all_reduce(tf.constant(1.0), world.group())),
        lines,
    )


@pytest.mark.slow
def test_without_the_library_on_one_rank_all_goes_by_the_engine():
    pytest.importorskip("horovod")
    with RankPool(2, "horovod") as pool:
        for is_without, total, lines in pool.run(hide_the_library_from, 1, timeout=120):
            assert (is_without, total) == (True, 2.0)
            assert ["HOROVOD_CYCLE_TIME=2.5" in line for line in lines] == [True]


@pytest.mark.parametrize(
    ("axes", "has_p2p", "by_nccl", "cycle"),
    [
        ({"data": 8}, True, False, 25.0),
        ({"data": 9}, True, False, 5.0),
        ({"data": 2}, False, False, 2.5),
        ({"data": 8}, True, True, 0.2),
        ({"data": 4, "tensor": 2}, True, True, 0.0),
        ({"pipeline": 2}, False, True, 0.0),
    ],
)
def test_horovod_looks_for_work_as_often_as_there_is_some(axes, has_p2p, by_nccl, cycle):
    mesh = Mesh(**axes).resolve(size=math.prod(axes.values()), rank=0)
    assert _cycle_ms(mesh, has_p2p, by_nccl) == cycle


def wait_for_a_rank_that_leaves():
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine()
    function = tf.function(lambda x: all_reduce(x, world.group(), name="of-one-that-leaves"))
    function(tf.ones([2]))
    if world.rank == 1:
        world.close()
        return "left"
    try:
        function(tf.ones([2]))
    except tf.errors.AbortedError as error:
        return error.message


@pytest.mark.slow
def test_who_waits_for_a_rank_that_leaves_learns_it():
    pytest.importorskip("horovod")
    with RankPool(2, "horovod") as pool:
        said, left = pool.run(wait_for_a_rank_that_leaves, timeout=60)
    assert left == "left"
    assert "of-one-that-leaves" in said
    assert "connection to rank 1 has ended" in said


def swap_large_tensors(megabytes: int):
    """Both ranks send more than any socket holds before either has read a byte."""
    import tensorflow as tf

    from tfdist.collectives import all_to_all
    from tfdist.testing import engine

    world = engine()
    rows = tf.fill([2, megabytes << 18], tf.cast(world.rank, tf.float32))
    return [float(tf.reduce_mean(row)) for row in all_to_all(rows, world.group())]


@pytest.mark.slow
def test_what_no_socket_holds_passes():
    pytest.importorskip("horovod")
    with RankPool(2, "horovod") as pool:
        assert pool.run(swap_large_tensors, 64, timeout=120) == [[0.0, 1.0]] * 2


def connected_beside_strangers() -> tuple:
    """Has this rank connect after strangers have called at its port, and while they do."""
    import tensorflow as tf

    import tfdist.collectives.p2p.connections as connections
    from tfdist.collectives import all_reduce
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine

    strangers: list[socket.socket] = []
    over = threading.Event()

    def disturb(address):
        while not over.is_set():
            with contextlib.suppress(OSError):
                sock = socket.create_connection(address, 1.0)
                strangers.append(sock)
                # From one that only connects to one that sends more than a proof.
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n" * (len(strangers) % 6))
                if len(strangers) % 3 == 0:
                    sock.close()

    connect_all = connections._connect_all

    def beside_strangers(own, lower, cards, listener, num_callers):
        address = listener.addresses[0]
        threading.Thread(target=disturb, args=(address,), daemon=True).start()
        while len(strangers) < 20:
            time.sleep(0.01)
        return connect_all(own, lower, cards, listener, num_callers)

    connections._connect_all = beside_strangers
    try:
        world = engine()
        total = all_reduce(tf.constant([1.0]), world.group(), name="beside strangers")
    finally:
        connections._connect_all = connect_all
        over.set()
    answer = isinstance(world, P2PEngine), float(total[0]), len(strangers) >= 20
    for sock in strangers:
        sock.close()
    return answer


@pytest.mark.slow
def test_strangers_do_not_keep_ranks_from_connecting():
    """Callers that hang up, say nothing or talk nonsense before the others have called."""
    pytest.importorskip("horovod")
    with RankPool(2, "horovod") as pool:
        answers = pool.run(connected_beside_strangers, timeout=120)
    assert answers == [(True, 2.0, True)] * 2
