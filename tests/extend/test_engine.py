"""An engine of somebody else's: tensors go over sockets, by way of rank 0."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Client, Listener

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import full_cross
from tfdist import Mesh
from tfdist.collectives import Group
from tfdist.extend import Engine
from tfdist.testing import RankPool, check_engine


class Hub:
    """Waits for the tensors of all members of a group, and sends all to each."""

    def __init__(self, address: tuple[str, int], size: int):
        self._lock, self._came = threading.Lock(), {}
        self._listener = Listener(address, backlog=size)
        threading.Thread(target=self._accept, args=(size,), daemon=True).start()

    def _accept(self, size: int) -> None:
        for _ in range(size):
            channel = self._listener.accept()
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel) -> None:
        while True:
            try:
                ranks, name, place, array = channel.recv()
            except EOFError:
                return
            with self._lock:
                came = self._came.setdefault((ranks, name), {})
                came[place] = channel, array
                if len(came) == len(ranks):
                    parts = [came[member][1] for member in range(len(ranks))]
                    for other, _ in self._came.pop((ranks, name)).values():
                        other.send(parts)


class SocketEngine(Engine):
    """All operations are made of one that gathers."""

    name = "sockets"

    def __init__(self, mesh: Mesh, address: str):
        super().__init__(mesh)
        host, port = address.split(":")
        if mesh.rank == 0:
            self._hub = Hub((host, int(port)), mesh.size)
        self._channel = connected((host, int(port)))
        #: TensorFlow runs what reads and writes a variable in the order of the program, on all ranks.
        self._turn = tf.Variable(0, trainable=False, dtype=tf.int64)

    def all_gather(self, tensor, group: Group, name):
        return self._gather(tensor, group, name)

    def all_gather_uneven(self, tensor, group, name):
        return self._gather(tensor, group, name)

    def all_reduce(self, tensor, group, reduction, name):
        return getattr(tf, f"reduce_{reduction}")(self._stacked(tensor, group, name), axis=0)

    def reduce_scatter(self, tensor, group, reduction, name):
        return tf.split(self.all_reduce(tensor, group, reduction, name), group.size)[group.rank]

    def all_to_all(self, tensor, group, name):
        parts = tf.split(self._gather(tensor, group, name), group.size**2)
        return tf.concat(parts[group.rank :: group.size], 0)

    def all_to_all_uneven(self, tensor, splits, group, name):
        every = self._gather(splits, group, f"{name}/splits")
        parts = tf.split(self._gather(tensor, group, name), every, num=group.size**2)
        mine = slice(group.rank, None, group.size)
        return tf.concat(parts[mine], 0), every[mine]

    def broadcast(self, tensor, root, group, name):
        return self._stacked(tensor, group, name)[root]

    def shutdown(self):
        super().shutdown()
        self._channel.close()

    def _stacked(self, tensor, group, name):
        shape = tf.concat([[group.size], tf.shape(tensor)], 0)
        return tf.reshape(self._gather(tensor, group, name), shape)

    def _gather(self, tensor, group, name):
        def exchange(array):
            self._channel.send((group.ranks, name, group.rank, array))
            return np.concatenate(self._channel.recv())

        with tf.control_dependencies([self._turn.read_value()]):
            found = tf.numpy_function(exchange, [tensor], tensor.dtype)
        with tf.control_dependencies([found]):
            self._turn.assign_add(1)
        found.set_shape([None, *tensor.shape[1:]])
        return found


def connected(address: tuple[str, int]):
    """A connection to the hub, once rank 0 has opened it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class WrongOrder(SocketEngine):
    def all_gather(self, tensor, group, name):
        return tf.concat(tf.unstack(self._stacked(tensor, group, name))[::-1], 0)


class DropsARank(SocketEngine):
    def all_reduce(self, tensor, group, reduction, name):
        if reduction != "sum":
            return super().all_reduce(tensor, group, reduction, name)
        return tf.reduce_sum(self._stacked(tensor, group, name)[:-1], axis=0)


class Raises(SocketEngine):
    def all_to_all(self, tensor, group, name):
        raise NotImplementedError("no all-to-all here")


class NeverReturns(SocketEngine):
    def broadcast(self, tensor, root, group, name):
        if self.rank == 1:
            time.sleep(3600)
        return super().broadcast(tensor, root, group, name)


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=full_cross)])
def test_an_engine_from_outside_does_all_operations(ranks):
    check_engine(SocketEngine, ranks, timeout=60)


@pytest.mark.timeout(120)
def test_an_engine_from_outside_does_all_operations_on_floats():
    check_engine(SocketEngine, dtypes=["float32"], timeout=60)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("broken", "wrong", "right"),
    [
        pytest.param(WrongOrder, "all_gather of int32 in a graph", "all_reduce", id="order"),
        pytest.param(DropsARank, "all_reduce sum of int32 eagerly", "all_gather", id="sum"),
    ],
)
def test_wrong_operations_are_named(broken, wrong, right):
    with pytest.raises(ValueError, match=rf"Received: {broken.__name__} ") as caught:
        check_engine(broken, dtypes=["int32"], timeout=60)
    assert f"- {wrong}: on rank 0, shape (1,)" in str(caught.value)
    assert f"- {right}" not in str(caught.value)


@pytest.mark.timeout(120)
def test_what_an_operation_raises_is_reported_with_its_call():
    with pytest.raises(ValueError, match="no all-to-all here") as caught:
        check_engine(Raises, dtypes=["int32"], timeout=60)
    assert "- all_to_all of int32 eagerly: shape (4,)" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_operation_that_does_not_return_is_named():
    with pytest.raises(ValueError, match="- broadcast of int32: TimeoutError: Ranks "):
        check_engine(NeverReturns, dtypes=["int32"], timeout=20)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="`make_engine` must be a function"):
        check_engine("sockets")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`num_ranks` must be an int of at least 2"):
        check_engine(SocketEngine, 1)
    with pytest.raises(ValueError, match="`dtypes` must be some of float32"):
        check_engine(SocketEngine, dtypes=["complex64"])
    with pytest.raises(ValueError, match="or a function that makes an Engine"):
        RankPool(2, engine="sockets")


def train(is_distributed: bool) -> list[np.ndarray]:
    """The weights after some steps, with a last batch that is not whole."""
    import contextlib

    import keras

    from tfdist.testing import strategy

    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 6)).astype("float32"), random.integers(0, 3, 30)
    keras.utils.set_random_seed(0)
    with strategy().scope() if is_distributed else contextlib.nullcontext():
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.timeout(180)
def test_fit_equals_one_process(one_process):
    (expected,) = one_process.run(train, False, timeout=90)
    with RankPool(2, engine=SocketEngine) as pool:
        for found in pool.run(train, True, timeout=90):
            for weight, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(weight, right, rtol=0, atol=1e-5)


def names_of_engines() -> list[tuple]:
    from tfdist.testing import engine, strategy

    found = [engine(), engine(Mesh(data=1, tensor=2)), strategy(zero_stage=1).engine]
    return [(type(each).__name__, each.rank, each.mesh.shape["tensor"]) for each in found]


def make_none(mesh: Mesh, address: str) -> None:
    """Forgets to return the engine."""


@pytest.mark.timeout(120)
def test_a_pool_of_an_engine_from_outside():
    with RankPool(2, engine=SocketEngine) as pool:
        found = pool.run(names_of_engines, timeout=60)
        assert found == [[("SocketEngine", rank, n) for n in (1, 2, 1)] for rank in (0, 1)]
        with pytest.raises(TypeError, match="returns an Engine"):
            RankPool(1, engine=make_none).run(names_of_engines, timeout=60)
