"""The flags of checkpoints: folder, interval and number."""

from __future__ import annotations

import os
import re
from typing import Any

from tfdist.checkpoint import directory_lock
from tfdist.launch.flags.values import YEAR, FlagDefiner, UsageError, folder, refuse, refuse_ignored
from tfdist.runtime.directories import checked_directory, is_address
from tfdist.runtime.tf_config import read_tf_config
from tfdist.utils.checks import LARGEST

#: Environment variables with the rank of a process.
_RANKS = ("HOROVOD_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK")


class CheckpointFlags:
    """The flags of a program that saves checkpoints.

    Args:
        define: The definer of the program's flags.

    Attributes:
        save_every: The flag of the interval.
        keep: The flag of the number of checkpoints to keep.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._workdir = define.string(
            "workdir", None, "Folder of the checkpoints; resume from the last"
        )
        self.save_every = define.string(
            "save_every", "auto", "Save interval: 100 (steps), 60s, or auto"
        )
        self.keep = define.integer("keep", 2, "Checkpoints to keep", lower_bound=1)

    @property
    def workdir(self) -> str | None:
        """Folder of the checkpoints; None for no checkpoints."""
        return self._workdir.value

    def options(self, *, is_tpu: bool, has_servers: bool = False) -> dict[str, Any]:
        """The arguments of `Checkpointer` for the interval and the number of checkpoints.

        Raises:
            UsageError: A value is invalid, or the folder cannot be used.
        """
        if has_servers:
            given = "with parameter servers"
            refuse_ignored(
                self._values, (self.save_every, self.keep), f"is not supported {given}", given
            )
        given = self.save_every.value
        found = re.fullmatch(r"(auto)|([1-9]\d*)|(\d+(?:\.\d+)?)s", given, re.ASCII)
        if found is None:
            raise UsageError(
                "--save_every must be a number of steps, a time such as 60s, or auto. "
                f"Received: --save_every={given}."
            )
        auto, steps, seconds = found.groups()
        if (steps and int(steps) > LARGEST) or (seconds and not 0 < float(seconds) <= YEAR):
            raise refuse(
                "save_every",
                given,
                f"at most {LARGEST:,} steps, or more than 0 and at most {YEAR:,} seconds",
            )
        if self.workdir is None:
            refuse_ignored(
                self._values, (self.save_every, self.keep), "requires --workdir", "alone"
            )
        else:
            _check_workdir(self.workdir, is_tpu)
        options: dict[str, Any] = {"keep_last": self.keep.value}
        if auto:
            return {"every": "auto", **options}
        interval = {"every_steps": int(steps)} if steps else {"every_seconds": float(seconds)}
        return {**interval, **options}

    def callbacks(self, options: dict[str, Any], batch_size: int) -> list:
        """The callback that saves and resumes; an empty list without a folder."""
        if self.workdir is None:
            return []
        from tfdist.callbacks import Checkpointer

        return [Checkpointer(self.workdir, **options, batch_size=batch_size)]

    def backups(self) -> list:
        """The callback for asynchronous workers, which saves after each epoch."""
        if self.workdir is None:
            return []
        import keras

        folder_of_backup = os.path.join(self.workdir, "backup")
        return [keras.callbacks.BackupAndRestore(folder_of_backup, delete_checkpoint=False)]


def _check_workdir(path: str, is_tpu: bool) -> None:
    """Reject invalid folders, and a folder that another job uses."""
    try:
        place = checked_directory(path, "--workdir")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not is_address(place):
        folder("workdir", place)
    if is_tpu:
        raise UsageError(
            f"--workdir is not supported on a TPU. Received: --workdir={path} --strategy=tpu."
        )
    if not _may_be_chief():
        return
    owner = directory_lock.holder_of(place)
    if owner is not None:
        raise UsageError(f"--workdir={path} cannot be used: {directory_lock.in_use(place, owner)}")


def _may_be_chief() -> bool:
    """Whether this process may acquire the lock, which other ranks' jobs already hold."""
    try:
        config = read_tf_config()
    except ValueError:
        return False  # The strategy reports what is wrong with it.
    if config is not None:
        return config.job == "worker" and config.index == 0
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    return not ranks or ranks[0] == "0"
