"""Global arrays on disk or in an object store: zarr 3, through TensorStore."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorstore as ts

__all__ = ["MANIFEST", "CheckpointError", "Storage", "StorageError"]

#: The file that says that all others are complete.
MANIFEST = "manifest.json"

#: A chunk is the unit of reading, of checksums and of what several ranks may write at once.
_CHUNK_BYTES = 16 << 20
#: Written to see whether one can, and deleted again.
_PROBE = "probe"


class CheckpointError(Exception):
    """A checkpoint cannot be written, or is not one for what it was to restore."""


class StorageError(CheckpointError, OSError):
    """Something cannot be read or written; one line says what."""


class Storage:
    """The files of one checkpoint.

    Args:
        path: A folder, or an address that TensorStore knows, as `gs://bucket/folder`.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path).rstrip("/")
        if "://" in self.path:
            self._kvstore: Any = f"{self.path}/"
        else:
            self._kvstore = {"driver": "file", "path": os.path.abspath(self.path) + "/"}
        self._files = ts.KvStore.open(self._kvstore).result()

    # -- small files --------------------------------------------------------------------------

    def write_json(self, name: str, value) -> None:
        """Writes a small file at once: it is there as a whole, or not at all."""
        self._ask("write", name, self._files.write(name, json.dumps(value, indent=1)))

    def read_json(self, name: str):
        """What a small file holds; None where there is none.

        Raises:
            StorageError: It cannot be read, or is no JSON.
        """
        found = self._ask("read", name, self._files.read(name))
        if found.state == "missing":
            return None
        try:
            return json.loads(found.value)
        except ValueError as error:
            raise StorageError(f"{self.path}/{name} is damaged: {error}.") from error

    def names(self, prefix: str = "") -> list[str]:
        """The names of the files below a prefix."""
        # Up to the first name that comes after all those with the prefix.
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        found = self._files.list(ts.KvStore.KeyRange(prefix, end))
        return [key.decode() for key in self._ask("list", prefix, found)]

    def check_writable(self) -> None:
        """Raises StorageError where nothing can be written."""
        self.write_json(_PROBE, None)
        self._ask("delete", _PROBE, self._files.write(_PROBE, None))

    def delete(self) -> None:
        """Deletes all files, first the one that says that the others are complete."""
        for name in (MANIFEST, ""):
            files = ts.KvStore.KeyRange(name, name + "\0" if name else "")
            self._ask("delete", name, self._files.delete_range(files))
        if isinstance(self._kvstore, dict):
            # A file system keeps the folders; they are empty now.
            shutil.rmtree(self._kvstore["path"], ignore_errors=True)

    # -- arrays -------------------------------------------------------------------------------

    def create(self, name: str, shape: tuple[int, ...], dtype: str) -> ts.TensorStore:
        """Makes the place for a global array, or opens it where another rank has."""
        spec = {
            **self._spec(name),
            "store_data_equal_to_fill_value": True,
            "metadata": {
                "shape": list(shape),
                "data_type": dtype,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": list(_chunk(shape, dtype))},
                },
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
        }
        return self._ask("create", name, ts.open(spec, create=True, open=True))

    def write(self, array: ts.TensorStore, parts: Iterable[tuple[tuple, np.ndarray]]) -> None:
        """Writes boxes of an array, and returns when they are there."""
        waiting = [array[box].write(value) for box, value in parts]
        for each in waiting:
            self._ask("write", "an array", each)

    def open(self, name: str, shape: tuple[int, ...], dtype: str) -> ts.TensorStore:
        """Opens an array, all of whose chunks are there.

        Raises:
            StorageError: It is not there, is not what the manifest says, or lacks chunks.
        """
        array = self._ask("open", name, ts.open(self._spec(name), open=True, read=True))
        found = tuple(array.shape), array.dtype.name
        if found != (tuple(shape), dtype):
            raise StorageError(
                f"{self.path}: the array `{name}` is damaged: {dtype}{list(shape)} was written. "
                f"Found: {found[1]}{list(found[0])}."
            )
        chunks = len(self.names(f"arrays/{name}/c"))
        chunk = _chunk(shape, dtype)
        expected = math.prod(
            math.ceil(size / part) for size, part in zip(shape, chunk, strict=True)
        )
        if math.prod(shape) and chunks != expected:
            raise StorageError(
                f"{self.path}: the array `{name}` is damaged: it lacks {expected - chunks} of its "
                f"{expected} chunks."
            )
        return array

    def read(self, array: ts.TensorStore, name: str, box: tuple) -> np.ndarray:
        """A box of an array.

        Raises:
            StorageError: A chunk is damaged: its checksum is another.
        """
        return self._ask("read", name, array[box].read())

    def _spec(self, name: str) -> dict[str, Any]:
        if isinstance(self._kvstore, str):
            return {"driver": "zarr3", "kvstore": f"{self._kvstore}arrays/{name}/"}
        path = f"{self._kvstore['path']}arrays/{name}/"
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}

    def _ask(self, what: str, name: str, future):
        """The result of a request; errors say what was asked."""
        try:
            return future.result()
        except (ValueError, OSError) as error:
            # What follows in brackets is for those who mend TensorStore.
            first = " ".join(str(error).split("[")[0].replace("\\x00", "/").split())
            raise StorageError(f"{self.path}: cannot {what} `{name}`: {first}") from error


def _chunk(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """The shape of a chunk: rows, as many as fit, or parts of a row."""
    left = max(1, _CHUNK_BYTES // ts.dtype(dtype).numpy_dtype.itemsize)
    found: list[int] = []
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        part = min(max(size, 1), max(1, left // max(inner, 1)))
        found.append(part)
        left = max(1, left // part)
    return tuple(found)
