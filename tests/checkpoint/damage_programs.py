"""Checkpoints that something happens to."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import keras
import numpy as np

from tfdist import callbacks, checkpoint
from tfdist.checkpoint import errors as checkpoint_errors


def model_of(width: int = 8, *, extra: bool = False) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, name="first")]
    if extra:
        layers.append(keras.layers.Dense(3, name="second"))
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def set_all(model: keras.Model, value: float) -> None:
    for variable in (*model.variables, *model.optimizer.variables):
        variable.assign(np.full(variable.shape, value, variable.dtype))


def values_of(model: keras.Model) -> set[float]:
    found = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return {float(value) for array in found for value in np.ravel(array)}


def saved(folder: str, steps: list[int]) -> list[str]:
    """Saves a model all of whose numbers are the step."""
    model = model_of()
    paths = []
    for step in steps:
        set_all(model, step)
        paths.append(checkpoint.save(folder, model, step=step))
    return paths


def restored(path: str, **options):
    """The numbers that a model then has, or the error; and what they were if it was one."""
    model = model_of(**options)
    set_all(model, -1.0)
    try:
        checkpoint.restore(path, model)
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error), values_of(model)
    return values_of(model)


@contextlib.contextmanager
def full_disk(room: int):
    """Inside, no file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved_on_a_full_disk(folder: str) -> tuple[str, str]:
    model = model_of(width=4096)
    with full_disk(8192):
        try:
            checkpoint.save(folder, model, step=9)
        except checkpoint_errors.StorageError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def trained_twice(folder: str) -> tuple[str, str]:
    """A training into whose directory another one saves meanwhile."""
    from tests.checkpoint.resume_programs import perceptron

    class Other(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            checkpoint.save(folder, model_of(), step=1000 + epoch)

    keras.backend.clear_session()
    model, data = perceptron({"data": 1})
    saver = callbacks.Checkpointer(folder, every_steps=2, asynchronous=False)
    try:
        model.fit(*data, epochs=2, batch_size=30, callbacks=[saver, Other()], verbose=0)
    except checkpoint_errors.StorageError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def never_begun(folder: str) -> tuple[str, str]:
    """What is said of inputs and targets that are not as many."""
    from tests.checkpoint.resume_programs import perceptron

    keras.backend.clear_session()
    model, (x, y) = perceptron({"data": 1})
    try:
        model.fit(x, y[1:], callbacks=[callbacks.Checkpointer(folder)], verbose=0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def kept(folder: str, **options) -> list[str]:
    """The checkpoints that a training of 20 steps leaves."""
    from tests.checkpoint.resume_programs import perceptron

    keras.backend.clear_session()
    model, data = perceptron({"data": 1})
    saver = callbacks.Checkpointer(folder, **options)
    model.fit(*data, epochs=2, callbacks=[saver], batch_size=12, verbose=0)
    assert not (Path(folder) / "tfdist.lock").exists()
    return sorted(path.name for path in Path(folder).glob("step-*"))


def starts(folder: str) -> list[list[str]]:
    """What checkpoints there are when a training begins, and after its first save, of older ones."""
    from tests.checkpoint.resume_programs import perceptron

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if not found:
                found.append(sorted(path.name for path in before if path.exists()))

    before = sorted(Path(folder).glob("step-*"))
    found: list[list[str]] = []
    keras.backend.clear_session()
    model, data = perceptron({"data": 1})
    saver = callbacks.Checkpointer(folder, every_steps=5)
    model.fit(*data, epochs=1, callbacks=[saver, Look()], batch_size=12, verbose=0)
    return [*found, sorted(path.name for path in before if path.exists())]


def begun_on_a_full_disk(folder: str) -> tuple[str, str]:
    """A training whose directory has no room."""
    with full_disk(0):
        try:
            kept(folder, every_steps=5)
        except checkpoint_errors.StorageError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def restored_and_said(path: str):
    """The numbers that a model then has, and the warnings."""
    from tests.checkpoint.fuzz import _heard

    said: list[str] = []
    with _heard(said):
        found = restored(path)
    return found, said


def saved_with_odd_names(folder: str) -> bool:
    """Whether layers with names that mean something to a file system come back."""
    names = [
        "..",
        ".",
        "c",
        "zarr.json",
        "a b",
        "ä\n",
        "x" * 600,
        "%2E%2E",
        "C",
        "0",
        "-",
        "\\",
        "~",
    ]

    def build():
        keras.backend.clear_session()
        layers = [keras.layers.Dense(2, name=name) for name in names]
        return keras.Sequential([keras.Input((2,)), *layers])

    saved, other = build(), build()
    for number, variable in enumerate(saved.variables):
        variable.assign(np.full(variable.shape, number + 1, variable.dtype))
    checkpoint.restore(checkpoint.save(folder, saved, step=1), other)
    pairs = zip(saved.variables, other.variables, strict=True)
    return all(np.array_equal(one.numpy(), two.numpy()) for one, two in pairs)


def saved_at_an_address(folder: str) -> list:
    """What restores find behind an address, as files are damaged one after the other."""
    from tfdist.checkpoint.restoring import restore_checked
    from tfdist.checkpoint.retention import Retention
    from tfdist.checkpoint.saving import Saver, lock_on, world_of

    address, model = f"file://{folder}", model_of()
    lock = lock_on(address, world_of(model))
    retention = Retention(address, 2, None)
    retention.begin()
    saver = Saver(address, model)
    paths = []
    for step in (0, 1, 2):
        set_all(model, step)
        paths.append(Path(saver.begin(step, {}, retention.completed).wait()[len("file://") :]))
    lock.release()
    assert not [path for path in paths[0].rglob("*") if path.is_file()]  # Two are kept.

    def numbers():
        set_all(model, -1.0)
        restore_checked(address, model, lambda state: None)
        return values_of(model)

    def said(path, words):
        """What a restore of one checkpoint says, cut down to some words where it says these."""
        try:
            restore_checked(f"{address}/{path.name}", model, lambda state: None)
        except checkpoint_errors.StorageError as error:
            return words if words in str(error) else str(error)
        return "nothing"

    found: list = [numbers()]
    chunk = paths[2] / "arrays/model/first/kernel/c/0/0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    found.append(said(paths[2], "kernel/c/0/0 is corrupt: digest mismatch"))
    found.append(numbers())
    (paths[1] / "arrays/model/first/bias/c/0").unlink()
    found.append(said(paths[1], "bias/c/0 is missing"))
    return found
