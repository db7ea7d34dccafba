"""Checkpoints that something happens to."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import keras
import numpy as np

from tfdist import checkpoint


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
        except checkpoint.StorageError as error:
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
    saver = checkpoint.Checkpointer(folder, every_steps=2, asynchronous=False)
    try:
        model.fit(*data, epochs=2, batch_size=30, callbacks=[saver, Other()], verbose=0)
    except checkpoint.StorageError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def never_begun(folder: str) -> tuple[str, str]:
    """What is said of inputs and targets that are not as many."""
    from tests.checkpoint.resume_programs import perceptron

    keras.backend.clear_session()
    model, (x, y) = perceptron({"data": 1})
    try:
        model.fit(x, y[1:], callbacks=[checkpoint.Checkpointer(folder)], verbose=0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def kept(folder: str, **options) -> list[str]:
    """The checkpoints that a training of 20 steps leaves."""
    from tests.checkpoint.resume_programs import perceptron

    keras.backend.clear_session()
    model, data = perceptron({"data": 1})
    saver = checkpoint.Checkpointer(folder, **options)
    model.fit(*data, epochs=2, callbacks=[saver], batch_size=12, verbose=0)
    assert not (Path(folder) / "tfdist.lock").exists()
    return sorted(path.name for path in Path(folder).glob("step-*"))
