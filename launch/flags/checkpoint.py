"""The options of checkpoints: folder, interval and number."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from tfdist.checkpoint import directory_lock
from tfdist.launch.flags.options import option, refuse_ignored
from tfdist.launch.flags.values import YEAR, UsageError, folder, refuse
from tfdist.runtime.directories import checked_directory, is_address
from tfdist.runtime.tf_config import read_tf_config
from tfdist.utils.checks import LARGEST

#: Environment variables with the rank of a process.
_RANKS = ("HOROVOD_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK")


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """The options of a program that saves checkpoints; see the flags of the same names."""

    workdir: str | None = option(None, "Folder of the checkpoints; resume from the last")
    save_every: str = option("auto", "Save interval: 100 (steps), 60s, or auto")
    keep: int = option(2, "Checkpoints to keep", least=1)

    def check(self, *, is_tpu: bool, has_servers: bool = False) -> None:
        """Reject an invalid interval, an unusable folder, and options that would be ignored.

        Raises:
            UsageError: A value is invalid, or the folder cannot be used.
        """
        saving = ("save_every", "keep")
        if has_servers:
            given = "with parameter servers"
            refuse_ignored(self, saving, f"is not supported {given}", given)
        self._interval()
        if self.workdir is None:
            refuse_ignored(self, saving, "requires --workdir", "alone")
        else:
            _check_workdir(self.workdir, is_tpu)

    def _interval(self) -> dict[str, Any]:
        """The argument of `Checkpointer` for the interval."""
        given = self.save_every
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
        if auto:
            return {"every": "auto"}
        return {"every_steps": int(steps)} if steps else {"every_seconds": float(seconds)}

    def callbacks(self, batch_size: int) -> list:
        """The callback that saves and resumes; an empty list without a folder."""
        if self.workdir is None:
            return []
        from tfdist.callbacks import Checkpointer

        options = {**self._interval(), "keep_last": self.keep}
        return [Checkpointer(_expanded(self.workdir), **options, batch_size=batch_size)]

    def backups(self) -> list:
        """The callback for asynchronous workers, which saves after each epoch."""
        if self.workdir is None:
            return []
        import keras

        folder_of_backup = os.path.join(_expanded(self.workdir), "backup")
        return [keras.callbacks.BackupAndRestore(folder_of_backup, delete_checkpoint=False)]


def _expanded(path: str) -> str:
    """The path with the home folder in place of `~`, which shells leave after `--workdir=`."""
    return path if is_address(path) else os.path.expanduser(path)


def _check_workdir(path: str, is_tpu: bool) -> None:
    """Reject invalid folders, and a folder that another job uses."""
    try:
        place = checked_directory(_expanded(path), "--workdir")
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
