"""Chains and how they are cut: against all cuts, and against what cannot be cut."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from tfdist import models
from tfdist.backend.keras.functional import initialize_weights, is_deferred
from tfdist.pipeline import deferred_weights
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.partition import balance, make_partition


def _measured(chain, **options) -> list[float]:
    monitoring = pytest.importorskip("tfdist.addons.monitoring")
    return monitoring.measure_seconds(chain, **options)


def dearest(costs, ends):
    begins = (0, *ends[:-1])
    return max(sum(costs[begin:end]) for begin, end in zip(begins, ends, strict=True))


def untrained(trained, ends):
    """How many stages have nothing to train."""
    begins = (0, *ends[:-1])
    return sum(
        not any(trained[begin:end])
        for begin, end in zip(begins, ends, strict=True)
        if trained is not None
    )


def test_balance_is_as_good_as_the_best_of_all_cuts():
    random = np.random.default_rng(0)
    for segments, stages in itertools.product(range(1, 9), range(1, 5)):
        if stages > segments:
            continue
        costs = random.integers(0, 20, segments).tolist()
        trained = (random.random(segments) < 0.5).tolist()
        for of_segments in (None, trained):
            ends = balance(costs, stages, of_segments)
            assert len(ends) == stages
            assert ends[-1] == segments
            assert list(ends) == sorted(set(ends))
            best = min(
                (untrained(of_segments, ends), dearest(costs, ends))
                for cut in itertools.combinations(range(1, segments), stages - 1)
                for ends in [(*cut, segments)]
            )
            assert (untrained(of_segments, ends), dearest(costs, ends)) == best


def dense_stack(layers=4):
    return [keras.Input((6,)), *[keras.layers.Dense(6, name=f"d{i}") for i in range(layers)]]


def test_a_list_becomes_a_chain_without_values():
    chain = Chain(dense_stack())
    assert [segment.name for segment in chain.segments] == ["d0", "d1", "d2", "d3"]
    assert [segment.parameters for segment in chain.segments] == [42] * 4
    assert all(is_deferred(v) for segment in chain.segments for v in segment.variables)


def test_deferred_weights_are_those_that_the_model_would_have_drawn():
    def build():
        keras.utils.set_random_seed(5)
        return models.gpt(50, num_layers=2, width=16, num_heads=2, max_length=8, dropout=0.1)

    expected = build()
    with deferred_weights():
        found = build()
    assert all(is_deferred(variable) for variable in found.variables)
    initialize_weights(found.variables)
    for a, b in zip(expected.variables, found.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    # Layers that are built later are none of its business.
    assert not is_deferred(keras.layers.Dense(2).build((None, 3)) or keras.Variable(1.0))


def test_shortcuts_are_not_cut():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, name="in")(inputs)
    for number in range(2):
        y = keras.layers.Dense(8, activation="relu", name=f"up{number}")(x)
        y = keras.layers.Dense(8, name=f"down{number}")(y)
        x = keras.layers.Add(name=f"add{number}")([x, y])
    chain = Chain(keras.Model(inputs, x))
    assert [segment.name for segment in chain.segments] == [
        "in",
        "up0 + down0 + add0",
        "up1 + down1 + add1",
    ]


def test_segments_one_after_the_other_are_the_model():
    model = models.convnet((12, 12, 1), 5, dropout=0.0)
    x = np.random.default_rng(0).normal(size=(3, 12, 12, 1)).astype("float32")
    chain = Chain(model)
    tensors = chain.flat_inputs(x)
    for segment in chain.segments:
        (number,) = segment.makes
        tensors |= segment(tensors, training=False)
        assert segment.after == (number,)
    y = tensors[number]
    np.testing.assert_allclose(y, model(x), rtol=1e-6)


def test_a_tied_embedding_is_in_two_segments():
    model = models.gpt(50, num_layers=1, width=16, num_heads=2, max_length=8)
    chain = Chain(model)
    assert chain.segments[0].layers == chain.segments[-1].layers
    held = [{id(variable) for variable in segment.variables} for segment in chain.segments]
    assert len(held[0] & held[-1]) == 1
    assert sum(map(len, held)) == len(set.union(*held)) + 1


def test_flops_of_products_are_counted():
    (flops,) = Chain([keras.Input((6,)), keras.layers.Dense(10, use_bias=False)]).flops(rows=3)
    assert flops == 2 * 3 * 6 * 10


def test_the_table_says_what_lies_where():
    partition = make_partition(Chain(dense_stack()), 2, cut=[3, 1])
    lines = partition.table().splitlines()
    assert lines[0].split() == ["stage", "rank", "layers", "parameters", "FLOPs", "share"]
    assert lines[1].split() == ["0", "0", "d0", "..", "d2", "(3)", "126", "234", "75.0%"]
    assert lines[2].split() == ["1", "1", "d3", "42", "78", "25.0%"]


def test_cuts():
    chain = Chain(dense_stack(6))
    assert make_partition(chain, 3).ends == (2, 4, 6)
    assert make_partition(chain, 2, cost="parameters").ends == (3, 6)
    assert make_partition(chain, 2, cost=[5, 1, 1, 1, 1, 1]).ends == (1, 6)
    cyclic = make_partition(chain, 2, 3, cut="cyclic")
    assert cyclic.ends == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 5}, "chain of 4 parts cannot be split into 5 stages"),
        ({"num_ranks": 2, "cut": [1, 2]}, r"4 in all. Received: cut=\[1, 2\]"),
        ({"num_ranks": 2, "cut": "odd"}, "'even', 'cyclic', or .* Received: cut='odd'"),
        ({"num_ranks": 3, "cut": "cyclic"}, "4 parts for 3 ranks x 1 chunks"),
        ({"num_ranks": 2, "cost": "memory"}, "`cost` must be 'flops', .* Received: cost='memory'"),
        (
            {"num_ranks": 2, "cost": [1.0]},
            r"each of the 4 parts of the chain. Received: cost=\[1.0\]",
        ),
        (
            {"num_ranks": 2, "cost": [1, -1, 1, 1]},
            "a number of at least 0 for each .* Received: cost=",
        ),
    ],
)
def test_refused_cuts(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_partition(Chain(dense_stack()), **arguments)


class Subclassed(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Subclassed, "a Sequential or a functional model. .* of type Subclassed"),
        (
            lambda: [keras.layers.Dense(3)],
            r"must begin with the `keras.Input`.* Received: \[<Dense .*, with Dense first",
        ),
        (list, r"Received: \[\], with an empty list first"),
        (
            lambda: keras.Sequential([keras.layers.Dense(2)]),
            "is not known. Begin it with a keras.Input",
        ),
        (
            lambda: keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2)]),
            r"FLOPs requires .* the input `.*` of shape \(None, None, 4\)",
        ),
    ],
)
def test_what_is_no_chain(make, message):
    with pytest.raises(ValueError, match=message):
        make_partition(Chain(make()), 1)


def test_measured_costs_see_what_takes_long():
    layers = [keras.Input((1024,)), keras.layers.Dense(1024), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dense(1024), keras.layers.Dense(8), keras.layers.Dense(8)]
    chain = Chain(layers)
    seconds = _measured(chain, rows=512, repeats=21)
    assert min(seconds[0], seconds[2]) > 2 * max(seconds[3], seconds[4]) > 0
    assert all(is_deferred(v) for segment in chain.segments for v in segment.variables)
    assert make_partition(chain, 2, cost=seconds).ends[0] in (1, 2)
    partition = make_partition(chain, 2, cost="seconds")
    assert len(partition.costs) == 5 and partition.num_stages == 2


def test_only_known_shapes_can_be_measured():
    with pytest.raises(ValueError, match="Only the number of rows may be undefined"):
        _measured(Chain([keras.Input((None, 4)), keras.layers.Dense(2)]))
