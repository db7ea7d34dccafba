"""What reads and assigns variables, where ranks hold shards of them.

The story: `SwapEMAWeights` ended in an AttributeError under ZeRO-3: Keras' callback takes `variable.value`
for a `tf.Variable`, and there it is a gathered tensor. `tf.train.Checkpoint` did the same. A constraint that
looks at a whole kernel, as MaxNorm does, was given a shard, and a layer that assigns its own kernel when it
is called, as SpectralNormalization, went on with the one from before: both trained wrongly, without a word.
"""

from __future__ import annotations

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import check, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import cross_entropy, scope, start
from tfdist import Mesh

ROWS, BATCH = 25, 6  # The last batch has one row.


def rows():
    chance = np.random.default_rng(3)
    return chance.normal(size=(ROWS, 6)).astype("float32"), chance.integers(0, 3, ROWS)


def dense(**options):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(7, "tanh", **options), layers.Dense(3)]
    )


def split():
    return keras.Sequential(
        [
            keras.Input((6,)),
            tfdist.layers.ColumnParallelDense(8, activation="tanh", gather_output=False),
            tfdist.layers.RowParallelDense(3, input_is_parallel=True),
        ]
    )


def averaging(**options):
    return keras.optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=None, **options
    )


def compiled(strategy, build=dense, optimizer=averaging, staged: bool = False):
    start()
    with scope(strategy):
        model = build()
        if staged and strategy is not None:
            model = tfdist.pipeline.PipelineModel(model, num_microbatches=2)
        model.compile(optimizer(), cross_entropy(), metrics=["accuracy"])
    return model


def fit(model, epochs: int = 3, some: int = ROWS, **options) -> dict:
    x, y = rows()
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(x[:some], y[:some], epochs=epochs, **options).history


def swap(strategy, on_epoch: bool = True, staged: bool = False, **made):
    """Averages are in the model's place when it is evaluated, and in the end."""
    model = compiled(strategy, staged=staged, **made)
    x, y = rows()
    some = ROWS - ROWS % BATCH if staged else ROWS
    swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
    history = fit(model, some=some, callbacks=[swaps], validation_data=(x[:8], y[:8]))
    more = model.evaluate(x[:12], y[:12], batch_size=6, verbose=0)
    shown = [] if staged else keras.callbacks.SwapEMAWeights()
    swapped = model.predict(x[:12], batch_size=6, verbose=0, callbacks=shown)
    for log in ("loss_scale", "skipped_steps"):
        history.pop(log, None)
    return outcome(model, history, staged=staged, evaluated=more, predicted=swapped)


def swap_and_save(strategy, folder: str, name: str = "model.weights.h5"):
    """`ModelCheckpoint` after the swap writes the averages."""
    model = compiled(strategy)
    folder = f"{folder}-{'one' if strategy is None else 'many'}"
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=name.endswith("h5"))
    history = fit(model, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True), saves])
    if name.endswith("h5"):
        model.load_weights(path)
    else:
        with scope(strategy):
            model = keras.models.load_model(path)
    return outcome(model, history)


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("as a job that was ended")


def swap_and_back_up(strategy, folder: str):
    """An interrupted run goes on from its backup, averages too."""
    folder = f"{folder}-{'one' if strategy is None else 'many'}"
    for fails in (True, False):
        model = compiled(strategy)
        swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        # Written before the weights are swapped: what a run without an end would go on from.
        callbacks = [keras.callbacks.BackupAndRestore(folder), swaps]
        try:
            history = fit(model, callbacks=[*callbacks, Fails()] if fails else callbacks)
        except RuntimeError:
            continue
    return outcome(model, history)


def constrained(strategy):
    rule = keras.constraints.MaxNorm(0.5)
    model = compiled(strategy, functools.partial(dense, kernel_constraint=rule))
    return outcome(model, fit(model))


class Halves(keras.layers.Layer):
    """Reads its kernel, assigns it, and reads it again."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, x, training=False):
        before = tf.matmul(x, tf.convert_to_tensor(self.kernel))
        if training:
            self.kernel.assign(self.kernel * 0.5)
        return before * tf.matmul(x, tf.convert_to_tensor(self.kernel))


def assigning():
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(7, "tanh"))
    return keras.Sequential([keras.Input((6,)), normalized, Halves(), keras.layers.Dense(3)])


def assigns(strategy):
    model = compiled(strategy, assigning)
    return outcome(model, fit(model))


def checkpoint(strategy, folder: str):
    """TensorFlow's own checkpoint has whole arrays, on every rank."""
    model = compiled(strategy)
    fit(model)
    prefix = os.path.join(folder, "one" if strategy is None else f"rank{strategy.mesh.rank}")
    path = tf.train.Checkpoint(model=model).write(prefix)
    held = {name: shape for name, shape in tf.train.list_variables(path) if "kernel" in name}
    fit(model)
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    return outcome(model, held=held)


def trees(strategy):
    """Keras' trees of states, from one model into another."""
    model = compiled(strategy)
    fit(model)
    tree, other = model.get_state_tree(), compiled(strategy)
    fit(other)
    other.set_state_tree(tree)
    return outcome(other, fit(other))


SWAPS = {
    "at_epochs": swap,
    "at_evaluation": functools.partial(swap, on_epoch=False),
    "scaled": functools.partial(
        swap, optimizer=lambda: keras.optimizers.LossScaleOptimizer(averaging())
    ),
    "accumulated": functools.partial(
        swap, optimizer=functools.partial(averaging, gradient_accumulation_steps=2)
    ),
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("stage", slow_but([3], [0, 1, 2, 3]))
@pytest.mark.parametrize("name", slow_but(["at_epochs"], SWAPS))
def test_averages_take_the_weights_places(pool, one_process, name, stage):
    check(pool, one_process, SWAPS[name], zero_stage=stage)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("on_epoch", [True, False])
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(pipeline=2)], ids=["tensor", "pipeline"])
def test_averages_of_split_models(pool, one_process, mesh, on_epoch):
    made = {"staged": True} if mesh.shape["pipeline"] > 1 else {"build": split}
    check(pool, one_process, functools.partial(swap, on_epoch=on_epoch, **made), mesh)


FILES = {
    "weights": swap_and_save,
    "model": functools.partial(swap_and_save, name="model.keras"),
    "backup": swap_and_back_up,
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", slow_but(["weights"], FILES))
def test_averages_in_files(pool, one_process, tmp_path, name, stage):
    program = functools.partial(FILES[name], folder=str(tmp_path / "run"))
    check(pool, one_process, program, zero_stage=stage)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_a_checkpoint_of_tensorflow(pool, one_process, tmp_path):
    program = functools.partial(checkpoint, folder=str(tmp_path))
    check(pool, one_process, program, zero_stage=3)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3]))
@pytest.mark.parametrize("program", slow_but([constrained, assigns], [constrained, assigns, trees]))
def test_what_else_assigns(pool, one_process, program, stage):
    check(pool, one_process, program, zero_stage=stage)
