"""Reports of `fit` to Ray Train."""

from __future__ import annotations

import os
from typing import Any

import keras
import ray.train

from tfdist.checkpoint import latest
from tfdist.utils import checks

#: By pyarrow's name of a file system.
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}


def run_directory() -> str:
    """The directory of this run in Ray's storage, for checkpoints: a folder, or an address of an object store.

    Raises:
        ValueError: tfdist has no checkpoints in the storage.
    """
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind not in _SCHEMES:
        raise ValueError(
            f"`storage_path` must be a folder or an address s3:// or gs://. Received: {storage.experiment_fs_path} in "
            f"a file system {kind}."
        )
    return _SCHEMES[kind] + storage.experiment_fs_path


class RayReport(keras.callbacks.Callback):
    """Reports the metrics of each epoch to Ray Train, and the newest checkpoint.

    Ray compares the numbers of reports of its workers, so every rank has this callback. It stands after the
    `Checkpointer`, whose checkpoints stay where they are: Ray only records their paths. The `Checkpointer` deletes
    older ones, as its `keep_last` says; the last report has the final one.

    Args:
        directory: The directory of the `Checkpointer`, below `run_directory()`; None to report no checkpoints.
            Without one, `Result.metrics` of Ray is None.

    Raises:
        TypeError: `directory` is not a path.
    """

    def __init__(self, directory: str | os.PathLike | None = None):
        super().__init__()
        self._directory = checks.path("directory", directory, optional=True)
        self._reported: str | None = None
        self._metrics: dict[str, float] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports an epoch."""
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self._metrics = {"epoch": epoch + 1, **metrics}
        self._report()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Reports the checkpoint of the final state, which the `Checkpointer` has saved by now."""
        if self._directory is not None and self._metrics:
            self._report()

    def _report(self) -> None:
        ray.train.report(
            self._metrics,
            checkpoint=self._newest(),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )

    def _newest(self) -> ray.train.Checkpoint | None:
        if self._directory is None or ray.train.get_context().get_world_rank():
            return None
        newest = latest(self._directory)
        if newest == self._reported:
            return None
        self._reported = newest
        return None if newest is None else ray.train.Checkpoint(newest)
