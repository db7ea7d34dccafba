"""What tests of callbacks look at: logs as they come, each rank's files, models without tfdist."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from tests.strategies import programs


class Record(keras.callbacks.Callback):
    """A callback of the user's own: notes what it is shown."""

    def __init__(self):
        super().__init__()
        self.train_batches: list[tuple[int, dict]] = []
        self.test_batches: list[tuple[int, dict]] = []
        self.epochs: list[tuple[int, dict]] = []

    def on_train_batch_end(self, batch, logs=None):
        self.train_batches.append((batch, dict(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.test_batches.append((batch, dict(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, dict(logs)))

    @property
    def shown(self) -> dict[str, list]:
        return {
            "train_batches": self.train_batches,
            "test_batches": self.test_batches,
            "epochs": self.epochs,
        }


@contextlib.contextmanager
def own_directory(strategy, root: Path) -> Iterator[Path]:
    """Works in a directory of this rank's own, as ranks on different machines do."""
    path = root / f"rank{strategy.mesh.rank if strategy is not None else 0}"
    path.mkdir(parents=True)
    with contextlib.chdir(path):
        yield path


def files(directory: Path) -> list[str]:
    """All files under a directory, relative to it."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in found)


def fit_with_all_callbacks(strategy, root: Path) -> programs.Result:
    """One fit with every callback that does not disturb the others."""
    programs.start()
    x, y = programs.images(programs.UNEVEN_ROWS)
    with programs.scope(strategy):
        model = programs.mlp()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    record, heard = Record(), []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            "epoch/{epoch:02d}-{val_accuracy:.2f}.weights.h5", save_weights_only=True
        ),
        keras.callbacks.ModelCheckpoint(
            "batch/{epoch:02d}-{batch:02d}.weights.h5", save_weights_only=True, save_freq=7
        ),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: heard.append((batch, dict(logs))),
            on_epoch_end=lambda epoch, logs: heard.append((epoch, dict(logs))),
        ),
        record,
    ]
    with own_directory(strategy, root):
        history = model.fit(
            x,
            y,
            batch_size=programs.BATCH,
            epochs=programs.EPOCHS,
            verbose=0,
            validation_data=programs.images(25, seed=1),
            callbacks=callbacks,
        )
    return programs.finish(model, history, x, y, extra={**record.shown, "lambda": heard})


def hide_tfdist() -> None:
    """Makes this process one in which tfdist is not installed."""
    sys.modules["tfdist"] = None  # type: ignore[assignment]


@contextlib.contextmanager
def without_tfdist() -> Iterator[concurrent.futures.Executor]:
    """Yields what runs functions in a new process in which tfdist cannot be imported."""
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=hide_tfdist
    ) as executor:
        yield executor


def saved_weights(path: Path, build: str = "mlp") -> dict:
    """The weights in a file, read by plain Keras into a model of its own."""
    keras.backend.clear_session()
    if path.name.endswith(".weights.h5"):
        model = getattr(programs, build)()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy())
        model.load_weights(path)
    else:
        model = keras.models.load_model(path)
    variables = [*model.weights, *model.optimizer.variables]
    return {f"{i}/{v.path}": v.numpy() for i, v in enumerate(variables)}


def saved_evaluation(path: Path, x, y) -> dict[str, float]:
    """What a saved model measures, in plain Keras."""
    keras.backend.clear_session()
    model = keras.models.load_model(path)
    return model.evaluate(x, y, batch_size=programs.BATCH, verbose=0, return_dict=True)


def served(path: Path, x):
    """What an exported model predicts, in plain TensorFlow."""
    loaded = tf.saved_model.load(os.fspath(path))
    return loaded.serve(x).numpy()
