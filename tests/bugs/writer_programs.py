"""Callbacks that write, and saves that fail: what they do on every rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.bugs.comparing import outcome
from tests.strategies.observing import files, own_directory
from tests.strategies.programs import scope, start

WORDS, FEATURES = 12, 4
seen: list = []


def data():
    chance = np.random.default_rng(1)
    x = chance.integers(0, WORDS, (21, 3)).astype("int32")
    return x, chance.normal(size=(21, 2)).astype("float32")


def network(strategy):
    start()
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(WORDS, FEATURES),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Looks:
    """What a writer of somebody's own does beside: work for all ranks."""

    model: Any

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        x, y = data()
        predicted = self.model.predict(x[:5], verbose=0)
        seen.append([float(predicted.sum()), self.model.evaluate(x[:5], y[:5], verbose=0)])


class Table(Looks, keras.callbacks.CSVLogger):
    pass


class Pictures(Looks, keras.callbacks.TensorBoard):
    pass


class Remote(Looks, keras.callbacks.RemoteMonitor):
    pass


class Bar(Looks, keras.callbacks.ProgbarLogger):
    pass


class Backup(Looks, keras.callbacks.BackupAndRestore):
    pass


def writers(kind: str) -> list:
    made = {
        "Table": lambda: Table("log.csv"),
        "Pictures": lambda: Pictures("board", update_freq=1, write_images=True),
        "Remote": lambda: Remote("http://127.0.0.1:9"),
        "Bar": lambda: Bar(),
        "Backup": lambda: Backup("backup", delete_checkpoint=False),
        "histograms": lambda: keras.callbacks.TensorBoard(
            "board", histogram_freq=1, write_images=True, embeddings_freq=1
        ),
        "all": lambda: [Table("log.csv"), Pictures("board"), Remote("http://127.0.0.1:9"), Bar()],
    }[kind]()
    return made if isinstance(made, list) else [made]


def fit(strategy, kind: str, root: Path):
    """Returns what one process has, too, and which files and requests are this rank's."""
    import requests

    posted: list = []
    before = requests.post
    requests.post = lambda *args, **kwargs: posted.append(args)  # type: ignore[assignment]
    seen.clear()
    try:
        with own_directory(strategy, root) as folder:
            model = network(strategy)
            x, y = data()
            history = model.fit(
                x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=writers(kind)
            ).history
            written = files(folder)
    finally:
        requests.post = before
    return outcome(model, history, seen=list(seen)), written, len(posted)


class Unwieldy(Exception):
    """Does not pickle: it is made of two arguments, and keeps one."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class Named(Exception):
    """Pickles."""


class Refuses(keras.layers.Dense):
    """A layer that cannot be saved."""

    error: Any = None

    def save_own_variables(self, store):
        if self.error is not None:
            raise self.error
        super().save_own_variables(store)


def failing(strategy, root: Path) -> tuple[list, dict]:
    """What is raised where the chief fails, and the training that goes on."""
    start()
    chief = strategy is None or strategy.is_chief
    with scope(strategy):
        layer = Refuses(2)
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data()
    x = x.astype("float32")
    raised = []

    @contextlib.contextmanager
    def caught():
        try:
            yield
        except Exception as error:
            # Of a class in words, since the one of this module is not that of the test's process.
            notes = getattr(error, "__notes__", [])
            raised.append(
                (type(error).__name__, isinstance(error, (OSError, Named)), str(error), notes)
            )
        else:
            raised.append(("nothing", False, "", []))

    with own_directory(strategy, root) as folder:
        (folder / "file").write_text("no folder")
        # Only the chief's path is bad; the others' would do.
        place = "file/more" if chief else "fine"
        for method, name in (("save", "m.keras"), ("save_weights", "m.weights.h5")):
            with caught():
                getattr(model, method)(f"{place}/{name}")
        with caught():
            model.export("model.onnx", format="onnx")
        saver = keras.callbacks.ModelCheckpoint(f"{place}/deep/m.keras")
        with caught():
            model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[saver])
        backup = keras.callbacks.BackupAndRestore(f"{place}/backup")
        with caught():
            model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[backup])
        for number, error in enumerate((Named("by name"), Unwieldy("layer", "no words"))):
            layer.error = error
            with caught():
                model.save_weights(f"m{number}.weights.h5")
        layer.error = None
        model.save_weights("m.weights.h5")
        history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
        written = files(folder)
    return raised, {**outcome(model, history), "written": " ".join(written) if chief else ""}
