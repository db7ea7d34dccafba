"""What training writes: once, by the chief, as one process would, and readable without tfdist."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks
from tests.strategies import programs
from tests.strategies.observing import (
    Record,
    files,
    own_directory,
    saved_evaluation,
    saved_weights,
    served,
)
from tests.strategies.programs import BATCH, EPOCHS, UNEVEN_ROWS, finish, images, scope, start

on_kinds = on_ranks(("horovod", 3), slow=[("tensorflow", 3)])


@on_kinds
def test_only_the_chief_writes(pool, one_process, observed):
    _, (expected,) = observed(one_process)
    _, directories = observed(pool)
    assert [files(directory) for directory in directories[1:]] == [[]] * (pool.num_ranks - 1)
    assert files(directories[0]) == files(expected)
    assert len(files(expected)) == 2 + EPOCHS + EPOCHS * 5 // 7


@on_kinds
def test_checkpoints_are_those_of_one_process(pool, one_process, observed, without_tfdist):
    """The best, by epoch and by batch, with the optimizer's state."""
    _, (expected,) = observed(one_process)
    _, (chief, *_) = observed(pool)
    saved = [name for name in files(chief) if name.endswith((".keras", ".h5"))]
    assert len(saved) == 1 + EPOCHS + EPOCHS * 5 // 7
    for name in saved:
        weights = without_tfdist(saved_weights, chief / name)
        assert "iteration" in str(sorted(weights))
        programs.compare(name, weights, without_tfdist(saved_weights, expected / name), 1e-5)


@on_kinds
def test_csv_log_is_the_history_of_one_process(pool, one_process, observed):
    (expected,), _ = observed(one_process)
    _, (chief, *_) = observed(pool)
    with open(chief / "log.csv", newline="") as log:
        rows = list(csv.DictReader(log))
    columns = {name: [float(row[name]) for row in rows] for name in rows[0]}
    assert columns.pop("epoch") == list(range(EPOCHS))
    programs.compare("log", columns, dict(sorted(expected.history.items())), 1e-5)


class Interrupted(Exception):
    pass


def interrupt(epoch: int, batch: int):
    """A callback that raises, as a machine that is taken away does."""
    at = []

    def on_train_batch_end(index, logs):
        if at[-1:] == [epoch] and index == batch:
            raise Interrupted

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda index, logs: at.append(index), on_train_batch_end=on_train_batch_end
    )


def train_in_order(strategy, callbacks=(), seed=7):
    """Without shuffling, so that a second run goes on with the batches of the first."""
    start(seed)
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = programs.mlp()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        validation_data=images(25, seed=1),
    )
    return finish(model, history, x, y)


def interrupted(strategy, root: Path, **options):
    """Trains until a callback raises in the third epoch, and then anew, as a new job would."""
    with own_directory(strategy, root) as directory:
        backup = functools.partial(keras.callbacks.BackupAndRestore, "backup", **options)
        with pytest.raises(Interrupted):
            train_in_order(strategy, [backup(), interrupt(epoch=2, batch=3)])
        kept = files(directory)
        record = Record()
        result = train_in_order(strategy, [backup(), record], seed=8)
        result.extra = {
            "kept": kept,
            "epochs": [epoch for epoch, _ in record.epochs],
            "left": sorted(str(path) for path in directory.iterdir()),
        }
    return result


@pytest.mark.slow
@on_kinds
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_an_interrupted_run_resumes(pool, one_process, tmp_path, save_freq):
    program = functools.partial(interrupted, save_freq=save_freq, double_checkpoint=True)
    (expected,) = one_process.run(programs.in_one_process, program, tmp_path / "one")
    results = pool.run(programs.on_rank, program, tmp_path / "many", timeout=200)
    chief, *others = [result.extra for result in results]
    assert chief == expected.extra
    assert chief["epochs"] == [2, 3]
    assert len(chief["kept"]) == 4  # The weights and the epoch, and those before them.
    for other in others:
        assert other == {**chief, "kept": []}
    assert chief["left"] == []
    programs.assert_same(results, expected)
    if save_freq == "epoch":
        (whole,) = one_process.run(programs.in_one_process, train_in_order)
        programs.compare("weights", results[0].weights, whole.weights, 1e-5)


def statistics(model) -> dict[str, np.ndarray]:
    names = ("moving_mean", "moving_variance")
    return {v.path: v.numpy() for v in model.weights if v.name in names}


def keep_own_statistics(strategy, root: Path):
    """A BatchNormalization that follows its own rank's rows, saved during and after training."""
    start()
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = programs.convnet(synchronized=False)
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    seen, at_epoch_ends = [], []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((batch, statistics(model))),
            on_epoch_end=lambda epoch, logs: at_epoch_ends.append(statistics(model)),
        ),
        keras.callbacks.ModelCheckpoint("epoch/{epoch}.weights.h5", save_weights_only=True),
    ]
    with own_directory(strategy, root) as directory:
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        after_fit = statistics(model)
        model.train_on_batch(x[:BATCH], y[:BATCH])
        before_save = statistics(model)
        model.save("model.keras")
        model.save_weights("model.weights.h5")
        model.export("exported", verbose=False)
        extra = {
            "by_epoch": [own for batch, own in seen if batch == 4],
            "at_epoch_ends": at_epoch_ends,
            "after_fit": after_fit,
            "before_save": before_save,
            "files": files(directory),
        }
    return finish(model, None, x, y, extra=extra)


@pytest.fixture(scope="session")
def own_statistics(tmp_path_factory):
    @functools.cache
    def train(pool):
        root = tmp_path_factory.mktemp("saved")
        results = pool.run(programs.on_rank, keep_own_statistics, root, timeout=200)
        return results, root / "rank0"

    return train


def mean_of(results, name: str, *index) -> dict[str, np.ndarray]:
    """The mean over ranks of what they noted, which is not what each of them noted."""
    own = [functools.reduce(lambda part, at: part[at], index, r.extra[name]) for r in results]
    for path in own[0]:
        assert np.ptp([one[path] for one in own], axis=0).max() > 1e-3, path
    return {path: np.mean([one[path] for one in own], axis=0) for path in own[0]}


def moving(weights) -> dict[str, np.ndarray]:
    return {path: value for path, value in weights.items() if "/moving_" in path}


@on_kinds
def test_unsynchronized_statistics_agree_after_training(pool, own_statistics):
    """The last batch has two rows, so the third rank gets none."""
    results, _ = own_statistics(pool)
    for result in results:
        for name, value in result.weights.items():
            assert np.isfinite(value).all(), name
            np.testing.assert_array_equal(value, results[0].weights[name], err_msg=name)
        assert result.evaluation == results[0].evaluation
    expected = mean_of(results, "by_epoch", 1)
    programs.compare("after fit", results[0].extra["after_fit"], expected, 1e-5)


@on_kinds
def test_callbacks_see_averaged_statistics(pool, own_statistics):
    results, _ = own_statistics(pool)
    for epoch in range(2):
        expected = mean_of(results, "by_epoch", epoch)
        for rank, result in enumerate(results):
            seen = result.extra["at_epoch_ends"][epoch]
            programs.compare(f"rank {rank} epoch {epoch}", seen, expected, 1e-5)


@on_kinds
def test_checkpoints_hold_averaged_statistics(pool, own_statistics, without_tfdist):
    results, chief = own_statistics(pool)
    for epoch in range(2):
        path = chief / f"epoch/{epoch + 1}.weights.h5"
        saved = moving(without_tfdist(saved_weights, path, "convnet"))
        programs.compare(f"epoch {epoch}", saved, mean_of(results, "by_epoch", epoch), 1e-5)


@on_kinds
def test_saving_by_hand(pool, own_statistics, without_tfdist):
    """`save`, `save_weights` and `export`, called on every rank."""
    results, chief = own_statistics(pool)
    assert [result.extra["files"] for result in results[1:]] == [[]] * (pool.num_ranks - 1)
    x, y = images(UNEVEN_ROWS)
    for name in ["model.keras", "model.weights.h5"]:
        weights = without_tfdist(saved_weights, chief / name, "convnet")
        expected = mean_of(results, "before_save")
        programs.compare(name, moving(weights), expected, 1e-5)
        own = dict(list(weights.items())[: len(results[0].weights)])  # Then the optimizer's.
        programs.compare(name, own, results[0].weights, 0)
    evaluation = without_tfdist(saved_evaluation, chief / "model.keras", x, y)
    programs.compare("evaluation", results[0].evaluation, evaluation, 1e-5)
    predictions = without_tfdist(served, chief / "exported", x)
    np.testing.assert_allclose(results[0].predictions[0], predictions, atol=1e-5)


def write_to_tensorboard(strategy, root: Path):
    start()
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 9, (UNEVEN_ROWS, 5)), random.integers(0, 4, UNEVEN_ROWS)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    with own_directory(strategy, root) as directory:
        model.fit(
            tokens,
            labels,
            batch_size=BATCH,
            epochs=2,
            verbose=0,
            validation_split=0.2,
            callbacks=[
                keras.callbacks.TensorBoard("by-epoch", histogram_freq=1, embeddings_freq=1),
                keras.callbacks.TensorBoard("by-batch", update_freq=2),
            ],
        )
        return files(directory)


def scalars(directory: Path) -> dict[str, float]:
    """What the event files under a directory say: by folder, name and step, as "folder/name@step"."""
    found = {}
    for path in sorted(directory.rglob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    folder = path.parent.relative_to(directory)
                    found[f"{folder}/{value.tag}@{event.step}"] = float(
                        tf.make_ndarray(value.tensor)
                    )
    return found


@pytest.mark.slow
@on_kinds
def test_tensorboard(pool, one_process, tmp_path):
    pytest.importorskip("tensorboard")
    one_process.run(programs.in_one_process, write_to_tensorboard, tmp_path / "one")
    written = pool.run(programs.on_rank, write_to_tensorboard, tmp_path / "many")
    assert written[1:] == [[]] * (pool.num_ranks - 1)
    expected, got = scalars(tmp_path / "one" / "rank0"), scalars(tmp_path / "many" / "rank0")
    by_batch = [name.partition("@")[2] for name in expected if "/batch_loss@" in name]
    assert by_batch == ["2", "4", "6", "8"]
    assert "by-epoch/validation/epoch_loss@1" in expected
    assert list(got) == list(expected)
    programs.compare("scalars", got, expected, 1e-5)
