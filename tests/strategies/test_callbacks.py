"""Keras' callbacks and the user's own: every rank sees, and decides, what one process would."""

from __future__ import annotations

import contextlib
import io
import re

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies import programs
from tests.strategies.observing import Record
from tests.strategies.programs import BATCH, EPOCHS, UNEVEN_ROWS, finish, images, mlp, scope, start

on_kinds = on_ranks(("horovod", 3), slow=[("tensorflow", 3)])


def compiled_mlp(strategy):
    with scope(strategy):
        model = mlp()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    return model


def assert_same_logs(results, expected, *names):
    """The ranks were shown the same to the last bit, and what one process is shown."""
    for name in names:
        compare_logs(results[0].extra[name], expected.extra[name], name)
        for result in results[1:]:
            assert result.extra[name] == results[0].extra[name], name


def compare_logs(got, expected, what):
    assert [(i, list(logs)) for i, logs in got] == [(i, list(logs)) for i, logs in expected], what
    for (index, one), (_, other) in zip(got, expected, strict=True):
        programs.compare(f"{what} {index}", one, other, 1e-5)


@on_kinds
def test_many_callbacks_do_not_change_training(pool, one_process, observed):
    expected, _ = observed(one_process)
    results, _ = observed(pool)
    programs.assert_same(results, expected[0])


@on_kinds
def test_a_users_callback_is_shown_what_one_process_is(pool, one_process, observed):
    expected, _ = observed(one_process)
    results, _ = observed(pool)
    assert len(expected[0].extra["train_batches"]) == EPOCHS * 5
    assert_same_logs(results, expected[0], "train_batches", "test_batches", "epochs")


@on_kinds
def test_lambda_callback_is_shown_what_one_process_is(pool, one_process, observed):
    expected, _ = observed(one_process)
    results, _ = observed(pool)
    assert_same_logs(results, expected[0], "lambda")


@on_kinds
def test_learning_rate_scheduler(pool, observed):
    results, _ = observed(pool)
    for result in results:
        rates = result.history["learning_rate"]
        np.testing.assert_allclose(rates, 0.05 * 0.8 ** np.arange(1, EPOCHS + 1), rtol=1e-6)


def stop_early(strategy):
    """The loss on other data rises from the third epoch on."""
    start()
    x, y = images(UNEVEN_ROWS)
    model = compiled_mlp(strategy)
    stopping = keras.callbacks.EarlyStopping(
        monitor="val_loss", patience=4, min_delta=0.01, restore_best_weights=True
    )
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=12,
        verbose=0,
        validation_data=images(25, seed=1),
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", patience=2, factor=0.5, min_delta=0.01
            ),
            stopping,
        ],
    )
    return finish(model, history, x, y, extra=(stopping.stopped_epoch, stopping.best_epoch))


@pytest.mark.slow
@on_kinds
def test_early_stopping_and_plateau(pool, one_process):
    expected = programs.reference(one_process, stop_early)
    assert expected.extra == (5, 1)
    assert expected.history["learning_rate"][3:] != expected.history["learning_rate"][:3]
    results = pool.run(programs.on_rank, stop_early)
    assert [result.extra for result in results] == [expected.extra] * pool.num_ranks
    programs.assert_same(results, expected)


def one_sample_is_not_a_number(strategy):
    """Of the third batch's rows, the seventh: on three ranks it is the second's."""
    start()
    x, y = images(UNEVEN_ROWS)
    x[2 * BATCH + 6] = np.nan
    model = compiled_mlp(strategy)
    record = Record()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN(), record],
    )
    return finish(model, history, x, y, extra=record.train_batches)


@on_kinds
def test_terminate_on_nan_stops_all_ranks_at_one_batch(pool, one_process):
    expected = programs.reference(one_process, one_sample_is_not_a_number)
    assert [batch for batch, _ in expected.extra] == [0, 1, 2]
    results = pool.run(programs.on_rank, one_sample_is_not_a_number)
    for result in results:
        compare_logs(result.extra, expected.extra, "batch")
    programs.assert_same(results, expected)


def fit_evaluate_and_predict_aloud(strategy):
    start()
    x, y = images(UNEVEN_ROWS)
    model = compiled_mlp(strategy)
    printed = {}
    for verbose in ["auto", 2]:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=verbose)
            model.evaluate(x, y, batch_size=BATCH, verbose=verbose)
            model.predict(x, batch_size=BATCH, verbose=verbose)
        printed[verbose] = text.getvalue()
    return printed


def values_shown(text: str) -> list[list[float]]:
    """The loss and accuracy that each line ends in: a bar is drawn as often as there is time."""
    lines = [re.findall(r"(?:loss|accuracy): ([\d.]+)", line)[-2:] for line in text.split("\n")]
    return [[float(value) for value in line] for line in lines if line]


@on_kinds
def test_only_the_chief_shows_progress(pool, one_process):
    expected = programs.reference(one_process, fit_evaluate_and_predict_aloud)
    chief, *others = pool.run(programs.on_rank, fit_evaluate_and_predict_aloud)
    for verbose, text in expected.items():
        assert len(values_shown(text)) == 3  # Two epochs and the evaluation.
        np.testing.assert_allclose(values_shown(chief[verbose]), values_shown(text), atol=2e-4)
        assert [printed[verbose] for printed in others] == [""] * (pool.num_ranks - 1)


def with_a_list_of_keras(strategy):
    """`fit` may be given Keras' own list of callbacks."""
    start()
    x, y = images(UNEVEN_ROWS)
    model, epochs = compiled_mlp(strategy), []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    callbacks = keras.callbacks.CallbackList([note], add_history=True, model=model, epochs=EPOCHS)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
    )
    return epochs, history.history["loss"]


@on_kinds
def test_a_list_of_keras_is_taken_as_any_other(pool, one_process):
    epochs, losses = programs.reference(one_process, with_a_list_of_keras)
    for own_epochs, own_losses in pool.run(programs.on_rank, with_a_list_of_keras):
        assert own_epochs == epochs == list(range(EPOCHS))
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
