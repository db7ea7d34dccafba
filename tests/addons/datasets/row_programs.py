"""Trainings on sources with random access, which count what is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.models.gpt_programs import scope

__all__ = ["SIZE", "batches", "fitted", "source_of"]

SIZE = 50


class Counted:
    """Rows, and the indices that were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        return self.rows[index]


def table() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    x = random.normal(size=(SIZE, 6)).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2]).astype("float32")


def source_of(kind: str, folder: str) -> tuple[Any, dict]:
    """A source of the table's rows, and the arguments of `row_dataset` for it."""
    x, y = table()
    if kind == "list":
        return list(zip(x, y, strict=True)), {}
    if kind == "grain":
        import grain

        data = grain.MapDataset.source(list(zip(x, y, strict=True)))
        return data.map(lambda row: (row[0], row[1])), {}
    if kind == "array_record":
        from array_record.python.array_record_data_source import ArrayRecordDataSource
        from array_record.python.array_record_module import ArrayRecordWriter

        path = Path(folder, "rows.array_record")
        if not path.exists():
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for row in np.concatenate([x, y], 1):
                writer.write(row.tobytes())
            writer.close()

        def parse(record: bytes):
            row = np.frombuffer(record, "float32")
            return row[:6], row[6:]

        return ArrayRecordDataSource(str(path)), {"transform": parse}
    import datasets

    found = datasets.Dataset.from_dict({"x": x, "y": y}).with_format("numpy")
    return found, {"columns": ("x", "y")}


class Batches(keras.utils.PyDataset):
    """The table's rows by batches, and the rows that were read."""

    def __init__(self, batch_size: int, dropped: Sequence[int] = (), **options):
        super().__init__(**options)
        self.batch_size, self.dropped, self.read = batch_size, dropped, list[int]()

    def __len__(self) -> int:
        return SIZE // self.batch_size

    def __getitem__(self, index: int) -> Any:
        rows = range(index * self.batch_size, (index + 1) * self.batch_size)
        self.read.extend(rows)
        if len(self.read) > 10 and index in self.dropped:
            return None  # Keras leaves it out, but not when it looks at the first ones.
        x, y = table()
        return x[rows], y[rows]


class Stopped(Exception):
    """The training was told to end."""


class Stop(keras.callbacks.Callback):
    def __init__(self, step: int):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self._step:
            raise Stopped


def fitted(
    options: dict, kind: str, folder: str, stop: int | None, saves: bool = False, **arguments
) -> tuple[list[np.ndarray], list[int], list[float], int]:
    """The weights after a training, the rows that this rank has read, the losses of epochs, and the first step."""
    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with scope(options):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    own: dict[str, Any] = {"batch_size": 8, "epochs": 3, **arguments}
    epochs, batch_size = own.pop("epochs"), own.pop("batch_size")
    read: list[int] = []
    if kind == "arrays":
        data: Any = dict(zip(("x", "y"), table(), strict=True)) | {"batch_size": batch_size}
        data["shuffle"] = False
    elif kind == "py":
        fed = {"shuffle": own["shuffle"], "steps_per_epoch": own["steps_per_epoch"]}
        data = {"x": Batches(batch_size, **own["dataset"]), **fed}
        read = data["x"].read
    else:
        source, more = source_of(kind, folder)
        counted = Counted(source)
        read = counted.read
        data = {"x": tfdist.addons.datasets.row_dataset(counted, batch_size, **more, **own)}
        read.clear()  # The last row, for its shapes.
    saver = tfdist.callbacks.Checkpointer(Path(folder, "saved"), every_steps=1)
    callbacks: list[Any] = [saver] if saves else []
    if stop is not None:
        callbacks.append(Stop(stop))
    callbacks.append(
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: places.append(int(model.optimizer.iterations))
        )
    )
    losses: list[float] = []
    places: list[int] = []
    try:
        history = model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
        losses = history.history["loss"]
    except Stopped:
        pass
    return model.get_weights(), list(read), losses, places[0]


def batches(seed: int | None, epochs: int, size: int) -> list[list[int]]:
    """The indices of each epoch."""
    import tfdist

    keras.utils.set_random_seed(1)
    data = tfdist.addons.datasets.row_dataset(list(range(size)), 4, shuffle_seed=seed)
    return [[int(i) for batch in data for i in batch] for _ in range(epochs)]
