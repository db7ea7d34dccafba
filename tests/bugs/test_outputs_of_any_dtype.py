"""`predict` and `strategy.gather` join what is no plain number too.

The story: `predict` of a model that ends in `StringLookup(invert=True)` raised, on each engine another
error, and complex numbers raised on TensorFlow's.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bugs.comparing import on_mesh
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import in_one_process, scope, start
from tfdist import Mesh
from tfdist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce_scatter,
    send,
)

ROWS = 7
DTYPES = ["string", "complex64", "complex128", "bool", "int8", "uint16", "bfloat16"]


class To(keras.layers.Layer):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def call(self, x):
        if self.kind == "string":
            return tf.strings.join([tf.strings.as_string(tf.cast(x, tf.int32)), "\0ä"])
        if self.kind.startswith("complex"):
            return tf.cast(tf.complex(x, x + 1), self.kind)
        return tf.cast(x, self.kind)


class Outputs(keras.Model):
    def __init__(self, kind: str):
        super().__init__()
        self.to = To(kind)

    def call(self, x):
        return {"out": self.to(x)}


def predict(strategy, *, kind: str):
    start()
    x = np.arange(2.0 * ROWS, dtype="float32").reshape(ROWS, 2)
    with scope(strategy):
        model = Outputs(kind)
        model.compile()
    return [model.predict(x, batch_size=size, verbose=0)["out"] for size in (ROWS, 4, 1)]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("tensorflow", 3)])
@pytest.mark.parametrize("kind", slow_but(["string", "complex64"], DTYPES))
def test_predictions_as_of_one_process(pool, one_process, kind):
    expected = one_process.run(in_one_process, functools.partial(predict, kind=kind))[0]
    for result in pool.run(on_mesh, functools.partial(predict, kind=kind), Mesh(), {}):
        for got, wanted in zip(result, expected, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


def labels(strategy):
    start()
    with scope(strategy):
        inputs = keras.Input((3,))
        best = keras.layers.Lambda(lambda p: tf.argmax(p, -1), output_shape=())(inputs)
        words = keras.layers.StringLookup(
            vocabulary=["a", "bé", ""], num_oov_indices=0, invert=True
        )
        model = keras.Model(inputs, words(best))
    return model.predict(np.eye(3, dtype="float32")[[0, 1, 2, 1, 0]], batch_size=3, verbose=0)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_labels_of_a_lookup(pool, one_process):
    expected = one_process.run(in_one_process, labels)[0]
    for result in pool.run(on_mesh, labels, Mesh(), {}):
        np.testing.assert_array_equal(result, expected)


def gathered(strategy):
    """Words of each rank: as many as its number, in a graph and eagerly, along both dims."""
    rank = strategy.mesh.rank
    words = tf.constant([["ab", ""], ["c\0", "é" * 70_000], ["", "x"]])[:rank]
    in_graph = tf.function(
        lambda some: strategy.gather(some, 0), input_signature=[tf.TensorSpec([None, 2], tf.string)]
    )
    even = tf.constant([[f"word {rank}", ""]])
    return [
        strategy.gather(words, 0).numpy().tolist(),
        in_graph(words).numpy().tolist(),
        in_graph(words[:0]).numpy().tolist(),
        all_gather(even, strategy.group(), 1).numpy().tolist(),
    ]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_gather_of_strings(pool):
    results = pool.run(on_mesh, gathered, Mesh(), {})
    words = [[b"ab", b""], [b"c\0", "é".encode() * 70_000], [b"", b"x"]]
    joined = [row for rank in range(len(results)) for row in words[:rank]]
    along = [[word for rank in range(len(results)) for word in (b"word %d" % rank, b"")]]
    assert results == [[joined, joined, [], along]] * len(results)


def complex_numbers(strategy, *, dtype: str):
    group = strategy.group()
    own = tf.cast(tf.complex([[1.0 + group.rank, 2.0]] * group.size, -3.0), dtype)
    received = (
        send(own, group, 1) if group.rank == 0 else recv(own, group, 0) if group.rank == 1 else own
    )
    parts, _ = all_to_all(own, group, [1] * group.size)
    found = [
        all_reduce(own, group),
        all_reduce(own, group, "mean"),
        reduce_scatter(own, group),
        all_to_all(own, group),
        parts,
        broadcast(own, group, 1),
        received,
    ]
    return [each.numpy() for each in found]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("tensorflow", 3)])
@pytest.mark.parametrize("dtype", slow_but(["complex128"], ["complex64", "complex128"]))
def test_other_operations_of_complex_numbers(pool, dtype):
    results = pool.run(on_mesh, functools.partial(complex_numbers, dtype=dtype), Mesh(), {})
    size = len(results)
    owns = [np.array([[1 + rank - 3j, 2 - 3j]] * size, dtype) for rank in range(size)]
    for rank, result in enumerate(results):
        total = sum(owns)
        exchanged = np.stack([owns[other][rank] for other in range(size)])
        sent = owns[0] if rank == 1 else owns[rank]
        wanted = [total, total / size, total[:1], exchanged, exchanged, owns[1], sent]
        for got, value in zip(result, wanted, strict=True):
            assert got.dtype == value.dtype
            np.testing.assert_allclose(got, value, rtol=1e-6)


def refused(strategy):
    group, words = strategy.group(), tf.constant(["a", "b"])
    calls = {
        "all_reduce": lambda: all_reduce(words, group, "max"),
        "reduce_scatter": lambda: reduce_scatter(words, group, "max"),
        "all_to_all": lambda: all_to_all(words, group),
        "broadcast": lambda: broadcast(words, group, 0),
        "send": lambda: send(words, group, 1 - group.rank),
        "recv": lambda: recv(words, group, 1 - group.rank),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(TypeError) as error:
            call()
        said[name] = str(error.value)
    with pytest.raises(ValueError, match="do not have an order"):
        all_reduce(tf.complex([1.0], 2.0), group, "max")
    return said


@on_ranks(("horovod", 2))
def test_other_operations_refuse_strings_in_a_line(pool):
    for said in pool.run(on_mesh, refused, Mesh(), {}):
        for line in said.values():
            assert "dtype string" in line and "\n" not in line
