"""Checkpoints between two syncs: each rank goes on by itself, or from what all had agreed on."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.slow_links.local_sgd import programs
from tests.checkpoint.resume_programs import Interrupt, Interruption
from tests.conftest import on_ranks
from tests.strategies import programs as training

SYNC_EVERY, EPOCHS, BATCH, ROWS = 4, 3, 12, 84  # Seven steps an epoch.


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((programs.FEATURES,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(programs.CLASSES),
        ]
    )


def compiled(kind: str, mesh: dict, policy: str = "float32", **options) -> keras.Model:
    from tfdist import Mesh
    from tfdist.testing import strategy

    training.start()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy(Mesh(**mesh)).scope():
            model = build()
            optimizer = programs.outer(kind, programs.inner("adamw"), SYNC_EVERY, **options)
            model.compile(optimizer, training.cross_entropy(), metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def fit(model, folder: str | None, *more, every_steps: int = 3):
    from tfdist.callbacks import Checkpointer

    x, y = programs.rows(ROWS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    callbacks = list(more)
    if folder is not None:
        callbacks.append(Checkpointer(folder, every_steps=every_steps, asynchronous=False))
    return model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history


def state_of(model) -> list[np.ndarray]:
    optimizer = model.optimizer
    return [v.numpy() for v in [*model.weights, *optimizer.variables]]


def interrupted(folder: str, stops: list[int], kind: str, policy: str, options: dict):
    """The end of a training, and of one that was interrupted and resumed."""
    whole = compiled(kind, {}, policy, **options)
    history = fit(whole, None)
    expected = state_of(whole)
    for stop in stops:
        model = compiled(kind, {}, policy, **options)
        with pytest.raises(Interruption):
            fit(model, folder, Interrupt(stop))
    model = compiled(kind, {}, policy, **options)
    resumed = fit(model, folder)
    return expected, state_of(model), history, resumed


CASES = [
    ("diloco", "float32", {}),
    ("diloco", "float32", {"fragments": 2, "overlap": 1}),
    ("slowmo", "mixed_float16", {}),
    ("local_sgd", "float32", {}),
]


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    CASES,
    ids=["diloco", "streaming", "scaled", "average"],
)
def test_goes_on_bit_for_bit(pool, tmp_path, kind, policy, options):
    # The saves at steps 6 and 9 are between two syncs, those at 12 are right after one.
    stops = [7] if (kind, policy, options) == CASES[0] else [7, 4, 5]
    results = pool.run(interrupted, str(tmp_path), stops, kind, policy, options, timeout=600)
    for expected, found, history, resumed in results:
        for own, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, right)
        assert history == resumed
        np.testing.assert_array_equal(found[0], results[0][1][0])


def saved(folder: str) -> list[np.ndarray]:
    """Trains six steps, saves, and returns the parameters of the sync after four."""
    from tfdist.checkpoint import save

    model = compiled("diloco", {})
    x, y = programs.rows(ROWS)
    for step in range(6):
        model.train_on_batch(x[12 * step : 12 * step + 12], y[12 * step : 12 * step + 12])
        if step == 3:
            agreed = [v.numpy() for v in model.trainable_variables]
    save(folder, model, step=6)
    return agreed


def restored(folder: str):
    from tfdist.checkpoint import restore

    model = compiled("diloco", {})
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    restore(folder, model)
    found = [v.numpy() for v in model.trainable_variables]
    momentum = sum(
        float(np.abs(v.numpy()).sum())
        for v in model.optimizer.variables
        if "outer_momentum" in v.path
    )
    return found, momentum, bool(model.optimizer.is_apart), fit(model, None)["loss"]


@pytest.mark.slow
@on_ranks(("horovod", 2), ("horovod", 3))
def test_on_another_number_of_ranks_training_begins_where_all_agreed(pool, one_process, tmp_path):
    agreed = pool.run(saved, str(tmp_path), timeout=600)[0]
    found, momentum, is_apart, losses = one_process.run(restored, str(tmp_path), timeout=600)[0]
    for own, right in zip(found, agreed, strict=True):
        np.testing.assert_array_equal(own, right)
    assert momentum > 0
    assert not is_apart
    assert losses[-1] < losses[0]
    # On as many ranks each gets what it had.
    again = pool.run(restored, str(tmp_path), timeout=600)
    assert all(is_apart for *_, is_apart, _ in again)
    assert not np.array_equal(again[0][0][0], again[1][0][0])
