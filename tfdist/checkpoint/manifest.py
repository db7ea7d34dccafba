"""What a checkpoint holds: written last, so that one without it does not count."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from typing import Any

from tfdist.checkpoint.storage import MANIFEST, CheckpointError, Storage, StorageError

__all__ = [
    "FORMAT",
    "Manifest",
    "NewerFormatError",
    "complete_checkpoints",
    "folder_of",
    "folders",
    "step_of",
]

FORMAT = 1
_FOLDER = re.compile(r"step-(\d+)-[0-9a-f]+")


class NewerFormatError(CheckpointError, ValueError):
    """A newer tfdist wrote a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: The training step after which it was taken.
        arrays: By name, shape and dtype of each global array.
        state: What else there is: anything that JSON can hold.
    """

    step: int
    arrays: dict[str, tuple[tuple[int, ...], str]]
    state: dict[str, Any]

    def write(self, storage: Storage) -> None:
        """Writes it; from then on the checkpoint is complete."""
        arrays = {name: [list(shape), dtype] for name, (shape, dtype) in self.arrays.items()}
        content = {"step": self.step, "arrays": arrays, "state": self.state}
        storage.write_json(
            MANIFEST, {"tfdist_checkpoint": FORMAT, "crc32": _crc(content), "content": content}
        )

    @classmethod
    def read(cls, storage: Storage) -> Manifest | None:
        """Reads it; None where there is none.

        Raises:
            StorageError: It is damaged.
            NewerFormatError: A newer tfdist wrote it.
        """
        found = storage.read_json(MANIFEST)
        if found is None:
            return None
        version = found.get("tfdist_checkpoint") if isinstance(found, dict) else None
        if not isinstance(version, int):
            raise StorageError(f"{storage.path}/{MANIFEST} is damaged: it is no manifest.")
        if version > FORMAT:
            raise NewerFormatError(
                f"{storage.path} was written by a newer tfdist, in version {version} of the format. "
                f"This one reads versions up to {FORMAT}: install the newer one."
            )
        content = found.get("content")
        if _crc(content) != found.get("crc32"):
            raise StorageError(f"{storage.path}/{MANIFEST} is damaged: its checksum is another.")
        arrays = {name: (tuple(shape), dtype) for name, (shape, dtype) in content["arrays"].items()}
        return cls(content["step"], arrays, content["state"])


def folder_of(step: int, token: str) -> str:
    """The folder of a checkpoint; the token keeps two jobs that save at the same step apart."""
    return f"step-{step:010d}-{token}"


def step_of(folder: str) -> int:
    """The step of a checkpoint's folder."""
    found = _FOLDER.fullmatch(folder)
    if found is None:
        raise ValueError(f"`{folder}` is not the name of a checkpoint's folder.")
    return int(found[1])


def folders(directory: str) -> dict[str, bool]:
    """The folders of checkpoints in a directory, and whether each is complete."""
    found: dict[str, bool] = {}
    for name in Storage(directory).names("step-"):
        folder, _, rest = name.partition("/")
        if _FOLDER.fullmatch(folder):
            found[folder] = found.get(folder, False) or rest == MANIFEST
    return found


def complete_checkpoints(directory: str) -> list[str]:
    """The folders in a directory whose checkpoints are complete, the newest first."""
    return sorted((folder for folder, whole in folders(directory).items() if whole), reverse=True)


def _crc(content) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
