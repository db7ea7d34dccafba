"""The dynamic loss scale: skipped steps are skipped by all, seen in the logs, and saved."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.pipeline import programs as gpt_programs
from tests.strategies import programs

#: Steps of the gradient that overflows, counted from 0.
OVERFLOWS = (1, 2, 7)
STEPS, GROWTH, SCALE = 12, 3, 2.0**10


@keras.saving.register_keras_serializable("tests")
class Overflow(keras.layers.Layer):
    """Hands its inputs on; the gradient is infinite in some steps, on one rank of the world."""

    def __init__(self, rank: int = -1, **kwargs):
        super().__init__(**kwargs)
        strategy = tf.distribute.get_strategy()
        self._is_victim = rank == (strategy.mesh.rank if hasattr(strategy, "mesh") else 0)

    def build(self, shape):
        self.counter = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.built = True

    def call(self, x, training=False):
        if not training or not self._is_victim:
            return x
        step = tf.identity(tf.convert_to_tensor(self.counter.value))
        self.counter.assign_add(1)

        @tf.custom_gradient
        def hand_on(x):
            bad = tf.reduce_any(step == tf.constant(OVERFLOWS))
            return tf.identity(x), lambda dy: tf.where(bad, tf.constant(np.inf, dy.dtype), dy)

        return hand_on(x)


def build(victim: int, axes: dict):
    from tfdist import layers

    split = "tensor" in axes
    hidden = (
        [layers.ColumnParallelDense(16, activation="relu"), layers.RowParallelDense(16)]
        if split
        else [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(16)]
    )
    return keras.Sequential(
        [keras.Input((64,)), hidden[0], Overflow(victim), hidden[1], keras.layers.Dense(4)]
    )


def train(strategy, victim: int, axes: dict, path: str | None = None) -> dict:
    from tfdist.pipeline import PipelineModel

    programs.start()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = programs.images(STEPS * 8)
        with programs.scope(strategy):
            model = build(victim, axes)
            if "pipeline" in axes:
                model = PipelineModel(model, num_microbatches=1, cut=[3, 1])
            inner = keras.optimizers.SGD(0.01, momentum=0.9)
            optimizer = keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=SCALE, dynamic_growth_steps=GROWTH
            )
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data = tf.data.Dataset.from_tensor_slices((x.reshape(len(x), -1), y)).batch(8)
        history = model.fit(data.repeat(), steps_per_epoch=1, epochs=STEPS, verbose=0)
        if path:
            model.save(path)
    finally:
        keras.config.set_dtype_policy("float32")
    return history.history


def train_on_rank(axes: dict, victim: int, path: str | None = None) -> dict:
    from tfdist import Mesh
    from tfdist.testing import strategy

    return train(strategy(Mesh(**axes)), victim, axes, path)


def expected() -> tuple[list[float], list[int]]:
    """Scale and skipped steps after each step, by the rule."""
    scale, good, skipped = SCALE, 0, 0
    scales, counts = [], []
    for step in range(STEPS):
        if step in OVERFLOWS:
            scale, good, skipped = scale / 2, 0, skipped + 1
        else:
            good += 1
            if good == GROWTH:
                scale, good = scale * 2, 0
        scales.append(scale)
        counts.append(skipped)
    return scales, counts


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize(
    ("axis", "victim"),
    # The layer lies on the first stage of the pipeline.
    slow_but(
        [("data", 0), ("tensor", 1), ("pipeline", 0)],
        [("data", 0), ("data", 1), ("tensor", 0), ("tensor", 1), ("pipeline", 0)],
    ),
)
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(pool, axis, victim):
    axes = {"data": 1} | {axis: 2}
    scales, skipped = expected()
    for history in pool.run(train_on_rank, axes, victim, timeout=120):
        assert history["loss_scale"] == scales
        assert history["skipped_steps"] == skipped
        assert np.all(np.isfinite(history["loss"]))


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_gpt_in_float16_learns_as_in_float32(pool, zero_stage):
    mesh = {"data": 2, "zero_stage": zero_stage}
    runs = [
        pool.run(gpt_programs.train, mesh, policy=policy, timeout=240)[0].history["loss"]
        for policy in (None, "mixed_float16")
    ]
    assert runs[0][-1] < 0.9 * runs[0][0]
    assert runs[1][-1] == pytest.approx(runs[0][-1], rel=0.02)


def saved_state(path: str) -> tuple[float, int, int, int]:
    model = keras.saving.load_model(path)
    optimizer = model.optimizer
    state = optimizer.dynamic_scale, optimizer._iterations, optimizer.iterations
    return tuple(float(part) for part in state)


@on_ranks(("horovod", 2))
def test_scale_and_counters_are_saved_and_plain_keras_loads_them(pool, tmp_path):
    path = str(tmp_path / "model.keras")
    pool.run(train_on_rank, {"data": 2}, 1, path, timeout=120)
    scales, skipped = expected()
    assert saved_state(path) == (scales[-1], skipped[-1], STEPS - len(OVERFLOWS))


def test_keras_leaves_the_counter_alone():
    """What skipped steps are counted in: a variable of Keras' own, which it saves and never uses."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    for gradient in (1.0, np.inf, 1.0):
        optimizer.apply([tf.constant([gradient])], [variable])
    assert int(optimizer.iterations) == 2
    assert int(optimizer._iterations) == 0
    assert any(v is optimizer._iterations for v in optimizer.variables)
