"""Kernels in the stead of Keras' many operations: they are taken, and give the same."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.backend.kernels import has_kernels, kernels


def operations(model, x, y) -> collections.Counter:
    """How often each operation stands in the graph of a training step."""

    @tf.function
    def step(x, y):
        return model.distribute_strategy.run(model.train_step, args=((x, y),))

    graph = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return collections.Counter(node.op for node in [*graph.node, *nodes])


def train(strategy, optimizer: str, options: dict):
    """A ConvNet with statistics of each rank's own rows; and the operations of its step."""
    programs.start()
    x, y = programs.images(48)
    with programs.scope(strategy):
        model = programs.convnet(synchronized=False)
        model.compile(
            getattr(keras.optimizers, optimizer)(1e-2, **options), programs.cross_entropy()
        )
    history = model.fit(x, y, batch_size=12, epochs=3, verbose=0)
    found = operations(model, x[:12], y[:12])
    return programs.finish(model, history, x, y, extra=found)


def on_one_rank(*args):
    from tfdist.strategies import LocalStrategy

    return train(LocalStrategy(), *args)


CASES = [
    ("Adam", {}, 1),
    ("AdamW", {"weight_decay": 0.05, "clipnorm": 0.5}, 1),
    ("Adam", {"amsgrad": True}, 0),
    ("Nadam", {}, 0),
]


@pytest.mark.parametrize(("optimizer", "options", "taken"), slow_but(CASES[1:3], CASES))
def test_they_give_what_keras_does(one_process, optimizer, options, taken):
    plain = one_process.run(train, None, optimizer, options, timeout=60)[0]
    ours = one_process.run(on_one_rank, optimizer, options, timeout=60)[0]
    programs.assert_same([ours], plain)
    trained = 5
    assert ours.extra["TfdistAdamVariable"] == trained * taken
    assert ours.extra["FusedBatchNormV3"] == 1 and not plain.extra["FusedBatchNormV3"]


def adam_of_a_perceptron(has_strategy: bool):
    from tfdist.strategies import LocalStrategy

    programs.start()
    x, y = programs.images(48)
    with programs.scope(LocalStrategy() if has_strategy else None):
        model = programs.mlp()
        model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.05), programs.cross_entropy())
    model.fit(x, y, batch_size=12, epochs=5, verbose=0)
    return [variable.numpy() for variable in model.variables + model.optimizer.variables]


def test_adam_has_the_constants_of_keras(one_process):
    """1 - 0.999 in float32 is off by 1e-5 of itself, and so is what a kernel makes of it."""
    plain, ours = (
        one_process.run(adam_of_a_perceptron, has, timeout=60)[0] for has in (False, True)
    )
    for found, right in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-8)


def adam_of_parts(stage: int):
    from tfdist.testing import strategy

    programs.start()
    x, y = programs.images(48)
    with strategy(zero_stage=stage).scope():
        model = programs.mlp()
        model.compile(keras.optimizers.Adam(1e-2), programs.cross_entropy())
    history = model.fit(x, y, batch_size=12, epochs=3, verbose=0)
    found = operations(model, x[:6], y[:6])
    return programs.finish(model, history, x, y, extra=found)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("stage", "taken"),
    slow_but([(1, "TfdistAdam")], [(1, "TfdistAdam"), (3, "TfdistAdamVariable")]),
)
def test_parts_of_parameters(pool, one_process, stage, taken):
    whole = one_process.run(adam_of_parts, 0, timeout=60)[0]
    results = pool.run(adam_of_parts, stage, timeout=60)
    programs.assert_same(results, whole)
    for result in results:
        assert result.extra[taken] == 4, result.extra


def test_moments_of_another_shape_are_refused():
    if not has_kernels():
        pytest.skip("The library is not built: `tfdist-install-horovod` builds it.")
    m, v = (tf.Variable(np.zeros(3, "float32")) for _ in range(2))
    numbers = {name: tf.constant(0.5) for name in ("rate", "decay_1", "decay_2", "epsilon")}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\] and \[2\]"):
        kernels().tfdist_adam(
            part=tf.ones([2]), gradient=tf.ones([2]), m=m.handle, v=v.handle, **numbers
        )
