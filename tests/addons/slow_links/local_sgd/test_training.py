"""What surrounds local steps: when ranks are equal, what is evaluated and saved, loss scales, hosts."""

from __future__ import annotations

import os
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.slow_links.local_sgd import programs
from tests.conftest import on_ranks, skip_without
from tests.gradients import test_loss_scale as scaled
from tests.strategies import programs as training
from tfdist.addons.slow_links import LocalSGD
from tfdist.testing import RankPool


class Watch(keras.callbacks.Callback):
    """Notes the parameters after each step, and what callbacks see at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.steps: list[list[np.ndarray]] = []
        self.epochs: list[list[np.ndarray]] = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.model.get_weights())


def compiled(optimizer, make=programs.build, **options):
    from tfdist.testing import strategy

    training.start()
    with strategy(**options).scope():
        model = make()
        model.compile(optimizer, training.cross_entropy(), metrics=["accuracy"])
    return model


def watched(sync_every: int):
    from tfdist.addons.slow_links import DiLoCo
    from tfdist.callbacks import VerifyModelSync

    model = compiled(DiLoCo("adamw", sync_every))
    x, y = programs.rows(84)
    watch, stopping = Watch(), keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    history = model.fit(
        x,
        y,
        batch_size=12,
        epochs=2,
        verbose=0,
        callbacks=[watch, stopping, VerifyModelSync(1)],
        shuffle=False,
    )
    return watch.steps, watch.epochs, model.get_weights(), history.history


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_ranks_are_equal_after_a_sync_and_only_then(pool):
    results = pool.run(watched, 4, timeout=600)
    chief = results[0]
    for steps, epochs, end, history in results[1:]:
        equal = [same(own, other) for own, other in zip(steps, chief[0], strict=True)]
        # Two epochs of seven steps.
        assert equal == [step % 4 == 0 for step in range(1, 15)]
        # Between two syncs callbacks see what ranks have agreed on last.
        assert same(epochs[0], chief[1][0])
        assert same(epochs[0], chief[0][3])
        assert same(end, chief[2])
        assert history == chief[3]


def same(some, others) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def between_syncs(path: str):
    """What is evaluated, predicted and saved after three of four steps, and what goes on after it."""
    model = compiled(LocalSGD("sgd", 4))
    before = model.get_weights()
    x, y = programs.rows(36)
    for begin in range(0, 36, 12):
        model.train_on_batch(x[begin : begin + 12], y[begin : begin + 12])
    own = model.get_weights()
    evaluated = model.evaluate(x, y, verbose=0, return_dict=True)
    predicted = model.predict(x, verbose=0)
    model.save(path)
    assert same(own, model.get_weights())
    model.set_weights(before)
    outputs = model(x).numpy()
    loss = float(training.cross_entropy()(y, outputs))
    return own, before, evaluated["loss"], loss, predicted, outputs


@on_ranks(("horovod", 2), slow=[("local", 1)])
def test_between_syncs_the_model_is_that_of_the_last(pool, tmp_path):
    path = str(tmp_path / "model.keras")
    results = pool.run(between_syncs, path, timeout=600)
    loaded = keras.saving.load_model(path)
    assert isinstance(loaded.optimizer, LocalSGD)
    for own, before, evaluated, loss, predicted, outputs in results:
        assert not same(own, before)
        assert same(loaded.get_weights(), before)
        assert evaluated == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(predicted, outputs, atol=1e-5)


def bytes_of_steps(kind: str | None, sync_every: int, steps: int) -> tuple[int, int]:
    """What this rank has sent in training, and the bytes of its parameters."""
    from tfdist.testing.traffic import traffic

    optimizer = keras.optimizers.SGD(0.1)
    if kind is not None:
        optimizer = programs.outer(kind, optimizer, sync_every)
    model = compiled(optimizer)
    x, y = programs.rows(12 * steps)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    model.fit(data, verbose=0)
    # What goes around training, its start and its end, is the same for another number of steps.
    before = traffic().sent
    model.fit(data, verbose=0)
    first = traffic().sent - before
    model.fit(data.repeat(2), verbose=0)
    return traffic().sent - before - 2 * first, 4 * model.count_params()


@on_ranks(("horovod", 2))
def test_a_sync_sends_what_a_step_did(pool):
    steps, sync_every = 40, 20
    common = pool.run(bytes_of_steps, None, 1, steps, timeout=600)
    local = pool.run(bytes_of_steps, "diloco", sync_every, steps, timeout=600)
    for (often, size), (seldom, _) in zip(common, local, strict=True):
        assert often > 0.9 * steps * size
        assert seldom < 1.15 * often / sync_every + 4096


def scaled_run(victim: int):
    from tfdist.testing import strategy

    training.start()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = programs.rows(12 * 8)
        with strategy().scope():
            model = keras.Sequential(
                [
                    keras.Input((programs.FEATURES,)),
                    keras.layers.Dense(16, activation="tanh"),
                    scaled.Overflow(victim),
                    keras.layers.Dense(programs.CLASSES),
                ]
            )
            model.compile(LocalSGD(keras.optimizers.SGD(0.1), 4), training.cross_entropy())
        watch = Watch()
        history = model.fit(
            x, y, batch_size=12, epochs=2, verbose=0, callbacks=[watch], shuffle=False
        )
    finally:
        keras.config.set_dtype_policy("float32")
    trained = [[w for w in step if w.ndim] for step in watch.steps]
    scale = float(model.optimizer.dynamic_scale)
    return trained, int(model.optimizer.iterations), scale, history.history


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_an_overflow_on_one_rank_moves_no_sync(pool):
    results = pool.run(scaled_run, 1, timeout=600)
    assert [each[1] for each in results] == [16, 16 - len(scaled.OVERFLOWS)]
    assert results[0][2] != results[1][2]
    assert results[0][3] == results[1][3]
    assert results[0][3]["skipped_steps"][-1] == len(scaled.OVERFLOWS)
    equal = [same(own, other) for own, other in zip(results[0][0], results[1][0], strict=True)]
    assert equal == [step % 4 == 0 for step in range(1, 17)]


HOSTS = ("a", "a", "b", "b")


def on_two_hosts(sync_every: int):
    """The parameters after each step, with gradients that are reduced inside of hosts."""
    socket.gethostname = lambda: HOSTS[int(os.environ["HOROVOD_RANK"])]
    model = compiled(LocalSGD(keras.optimizers.SGD(0.1), sync_every, within="host"))
    watch = Watch()
    # The last of the batches has rows for three ranks of four.
    x, y = programs.rows(87)
    model.fit(x, y, batch_size=12, verbose=0, callbacks=[watch], shuffle=False)
    return watch.steps, model.get_weights()


@pytest.mark.slow
def test_every_step_inside_of_a_host_and_every_few_between():
    skip_without("horovod")
    with RankPool(4, "horovod") as pool:
        results = pool.run(on_two_hosts, 4, timeout=600)
    for place in range(8):
        ranks = [steps[place] for steps, _ in results]
        assert same(ranks[0], ranks[1])
        assert same(ranks[2], ranks[3])
        assert same(ranks[0], ranks[2]) == (place % 4 == 3)
    with RankPool(1, "local") as one:
        expected = one.run(seven_batches, timeout=600)[0]
    for own, right in zip(results[0][0][6], expected[0], strict=True):
        np.testing.assert_allclose(own, right, rtol=0, atol=1e-5)


def seven_batches() -> list[list[np.ndarray]]:
    """The parameters of each host after seven steps of twelve rows, by plain Keras."""
    training.start()
    x, y = programs.rows(87)
    models = [programs.build(), programs.build()]
    models[1].set_weights(models[0].get_weights())
    optimizers = [keras.optimizers.SGD(0.1) for _ in models]
    loss = training.cross_entropy()
    for step in range(7):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = programs.own_rows(12 * step, 12 * step + 12, 2, host)
            with tf.GradientTape() as tape:
                value = loss(y[own], model(x[own]))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)
        if step == 3:
            means = [
                np.mean(pair, axis=0)
                for pair in zip(*[m.get_weights() for m in models], strict=True)
            ]
            for model in models:
                model.set_weights(means)
    return [model.get_weights() for model in models]
