"""What the documents' Python fragments take for granted, and how a rank runs them.

One prelude for all documents: a name that a block uses and does not define is made here, when the
block first asks for it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

__all__ = ["run_block", "smaller"]

_ROWS = 20  # On three ranks or more, and in batches of 8, they do not divide.
_BATCH_SIZE = 8
_VOCABULARY = 64
_TIME = 8

#: What documents train is larger than a test can wait for: the same calls, with these numbers.
_SMALLER = [
    (r"\b50_257\b", str(_VOCABULARY)),
    (r"\b(num_layers|num_heads|num_microbatches)=\d+", r"\1=2"),
    (r"\b(width|max_length|hidden_dim|intermediate_dim)=\d+", r"\1=16"),
    (r"\bepochs=\d+", "epochs=1"),
]


def smaller(source: str, folder: Path) -> str:
    """A block with small models, one epoch, and with what it saves in a folder of the test's."""
    for pattern, number in _SMALLER:
        source = re.sub(pattern, number, source)
    return source.replace('"/data/', f'"{folder}/')


class _Names(dict):
    """The globals of a block."""

    def __missing__(self, name: str):
        if name not in _GIVEN:
            raise KeyError(name)
        self[name] = _GIVEN[name](self)
        return self[name]


def run_block(path: str, folder: str) -> None:
    """Runs a block on this rank, as it stands in a file.

    Args:
        path: The file; TensorFlow's AutoGraph reads functions there.
        folder: The working directory meanwhile.
    """
    import keras

    names = _Names(__name__="__main__", __builtins__=__builtins__)
    policy, before = keras.config.dtype_policy(), os.getcwd()
    os.chdir(folder)
    try:
        with _shared_strategies():
            exec(compile(Path(path).read_text(), path, "exec"), names)
            for name in list(names):
                if name in _FOLLOWS:
                    _FOLLOWS[name](names)
    finally:
        keras.config.set_dtype_policy(policy)
        os.chdir(before)


@contextlib.contextmanager
def _shared_strategies() -> Iterator[None]:
    """Has strategies that a block makes run on the engine of this rank of the pool."""
    from tfdist import strategies

    with contextlib.ExitStack() as stack:
        for name in ("HorovodStrategy", "MultiWorkerStrategy", "auto"):
            made = _shared(getattr(strategies, name))
            stack.enter_context(mock.patch.object(strategies, name, made))
        yield


def _shared(kind: Callable) -> Callable:
    from tfdist import testing

    signature = inspect.signature(kind)

    def make(*args, **options):
        signature.bind(*args, **options)  # As the true one would refuse it.
        if "engine" in options:  # This is `testing.strategy`, which makes it.
            return kind(*args, **options)
        return testing.strategy(*args, **options)

    return make


def _build(names):
    """`build`, for the images of `x`."""
    keras = names["keras"]

    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )

    return build


def _model(names):
    with names["strategy"].scope():
        model = names["build"]()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _data_set(names, *arrays):
    return names["tf"].data.Dataset.from_tensor_slices(arrays).batch(_BATCH_SIZE)


def _images(_):
    import numpy as np

    return np.random.default_rng(0).random((_ROWS, 8, 8, 1), dtype="float32")


def _labels(_):
    import numpy as np

    return np.random.default_rng(1).integers(0, 10, _ROWS)


def _tokens(names):
    ids = names["np"].random.default_rng(2).integers(0, _VOCABULARY, (_ROWS, _TIME + 1))
    return _data_set(names, ids[:, :-1], ids[:, 1:])


def _module(name: str):
    return lambda _: __import__(name)


def _losses(names):
    return names["keras"].losses.SparseCategoricalCrossentropy(reduction="none")


def _reader(names):
    """`read`: the rows of files, which are numbers of rows here."""
    x, y = names["x"], names["y"]
    return lambda files: names["tf"].data.Dataset.from_tensor_slices((x[files], y[files]))


def _supervised_contrastive(names):
    tf = names["tf"]

    def loss(labels, embeddings):
        labels = tf.reshape(labels, [-1])
        alike = tf.cast(labels[:, None] == labels[None], embeddings.dtype)
        return -tf.reduce_mean(alike * tf.matmul(embeddings, embeddings, transpose_b=True))

    return loss


#: How a name is made, from others.
_GIVEN: dict[str, Callable] = {
    "keras": _module("keras"),
    "keras_hub": _module("keras_hub"),
    "np": _module("numpy"),
    "tf": _module("tensorflow"),
    "tfdist": _module("tfdist"),
    "Mesh": lambda names: names["tfdist"].Mesh,
    "HorovodStrategy": lambda names: names["tfdist"].strategies.HorovodStrategy,
    "strategy": lambda names: names["tfdist"].strategies.auto(),
    "build": _build,
    "model": _model,
    "loss": lambda _: "sparse_categorical_crossentropy",
    "optimizer": lambda names: names["model"].optimizer,
    "load": lambda names: lambda: (names["x"], names["y"]),
    "x": _images,
    "y": _labels,
    "data": lambda names: names["dataset"],
    "dataset": lambda names: _data_set(names, names["x"], names["y"]),
    "tokens": _tokens,
    "all_files": lambda _: list(range(_ROWS)),
    "read": _reader,
    "supervised_contrastive": _supervised_contrastive,
    "losses_of": lambda names: lambda outputs, labels: _losses(names)(labels, outputs),
    "GLOBAL_BATCH_SIZE": lambda _: _BATCH_SIZE,
}


def _fit_with(names):
    names["model"].compile("sgd", names["contrastive_loss"])
    names["model"].fit(names["x"], names["y"], batch_size=_BATCH_SIZE)


def _take_steps(names):
    for name in ("model", "optimizer"):
        names[name]  # Made here: inside of `strategy.run` it would be too late.
    for batch in names["batches"]:
        names["step"](*batch)


#: What is done with a function that a block only defines.
_FOLLOWS: dict[str, Callable] = {"contrastive_loss": _fit_with, "step": _take_steps}
