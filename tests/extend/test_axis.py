"""A mesh axis of one's own, and a layer whose weights are split over it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.conftest import on_ranks
from tfdist import Axis, Mesh
from tfdist.extend import add_split_weight, axis_group, copy_to_region, gather_from_region


class SplitDense(keras.layers.Layer):
    """Y = X W, with the columns of W split over the ranks of an axis."""

    def __init__(self, units: int, axis: str):
        super().__init__()
        self.units, self.axis = units, axis

    def build(self, input_shape):
        """Each rank has its columns of what one process would draw."""
        self._group = axis_group(self.axis)
        shape = (input_shape[-1], self.units)
        self.kernel = add_split_weight(
            self, shape, 1, axis=self.axis, name="kernel", initializer="glorot_uniform"
        )

    def call(self, inputs):
        """All columns, gathered."""
        if self._group is None:
            return tf.matmul(inputs, self.kernel)
        own = tf.matmul(copy_to_region(inputs, self._group), self.kernel)
        return gather_from_region(own, self._group)


def trained(mesh, zero_stage):
    strategy = tfdist.testing.strategy(mesh, zero_stage=zero_stage)
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(0)
    x = random.normal(size=(11, 6)).astype("float32")
    with strategy.scope():
        layers = [SplitDense(8, "ring"), keras.layers.ReLU(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, x[:, :3], batch_size=5, epochs=5, shuffle=False, verbose=0)
    held = model.layers[0].kernel.shape[-1] if zero_stage < 3 else None
    return held, [tfdist.sharding.whole_value(w).numpy() for w in model.weights]


RING = Axis("ring", "weights")


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_as_one_process(pool, one_process, zero_stage):
    _, expected = one_process.run(trained, Mesh(axes={RING: 1}), 0, timeout=120)[0]
    for held, weights in pool.run(trained, Mesh(data=1, axes={RING: 2}), zero_stage, timeout=200):
        assert held in (4, None)
        for found, right in zip(weights, expected, strict=True):
            np.testing.assert_allclose(found, right, atol=1e-5)


def of_an_unknown_axis():
    with tfdist.testing.strategy(Mesh()).scope(), pytest.raises(ValueError) as caught:
        axis_group("rings")
    return str(caught.value)


def test_an_axis_that_the_mesh_lacks_is_refused(one_process):
    (said,) = one_process.run(of_an_unknown_axis)
    assert "'rings'" in said and "data" in said
