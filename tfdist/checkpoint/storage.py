"""The files of a checkpoint, on disk or in an object store; arrays are written through TensorStore."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorstore as ts

from tfdist.checkpoint import files
from tfdist.checkpoint.chunks import CHUNK_BYTES, chunk_shape_of, folder_of_array, metadata_of
from tfdist.checkpoint.errors import StorageError
from tfdist.runtime.directories import is_address

#: The file that says that all others are complete.
MANIFEST = "manifest.json"
#: There from the first byte of a checkpoint until its manifest is there.
UNFINISHED = "unfinished"

#: The most that a small file may have. A manifest has some 200 bytes for each array.
_JSON_BYTES = 256 << 20
#: Written to see whether one can, and deleted again.
_PROBE = "probe"


def digest_of(content: bytes) -> str:
    """What a manifest says of the content of a file; hashing releases Python's lock."""
    return hashlib.sha256(content).hexdigest()


class Storage:
    """The files below a folder, or below an address such as `gs://bucket/folder`."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self._local: str | None = None
        if is_address(self.path):
            self.path = self.path.rstrip("/")
            self._kvstore: Any = f"{self.path}/"
        else:
            self._local = os.path.abspath(self.path)
            self._kvstore = {"driver": "file", "path": self._local.rstrip("/") + "/"}
        try:
            self._files = ts.KvStore.open(self._kvstore).result()
        except (ValueError, OSError, NotImplementedError) as error:
            raise StorageError(f"{self.path} cannot be opened: {_first(error)}") from error

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of a file system."""
        return self._local is not None

    # -- small files --------------------------------------------------------------------------

    def write_json(self, name: str, value) -> None:
        """Writes a small file at once: it is there as a whole, or not at all."""
        self._ask("write", name, self._files.write(name, json.dumps(value, indent=1)))

    def read_json(self, name: str):
        """What a small file holds; None where there is none."""
        content = self.read(name, _JSON_BYTES)
        if content is None:
            return None
        try:
            return json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise StorageError(f"{self.path}/{name} is damaged: {error}.") from error

    def read(self, name: str, limit: int = CHUNK_BYTES) -> bytes | None:
        """The content of a file; None where there is none.

        Raises:
            StorageError: It is no regular file, is longer than `limit`, or cannot be read.
        """
        if self._local is not None:
            return files.read_file(self._local, name, limit)
        found = self._ask("read", name, self._files.read(name))
        if found.state == "missing":
            return None
        if len(found.value) > limit:
            raise StorageError(
                f"{self.path}/{name} is damaged: it has {len(found.value):,} bytes, {limit:,} at "
                "most are right."
            )
        return found.value

    def read_version(self, name: str) -> tuple[bytes | None, bytes]:
        """The content of a small file, None where there is none, and which version of it that is."""
        found = self._ask("read", name, self._files.read(name))
        content = None if found.state == "missing" else found.value
        return content, found.stamp.generation

    def write_version(self, name: str, content: bytes | None, version: bytes) -> bytes | None:
        """Writes a small file that nobody has written since `version`; None as content deletes it.

        Returns its new version; None where it has another than `version`, and was left as it is.
        """
        done = self._ask("write", name, self._files.write(name, content, if_equal=version))
        return done.generation or None

    def names(self, prefix: str = "") -> list[str]:
        """The names of the files below a prefix."""
        # Up to the first name that comes after all those with the prefix.
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        found = self._files.list(ts.KvStore.KeyRange(prefix, end))
        return [key.decode(errors="replace") for key in self._ask("list", prefix, found)]

    def check_writable(self) -> None:
        """Raises StorageError where nothing can be written; leaves nothing behind."""
        try:
            self.write_json(_PROBE, None)
        except StorageError:
            with contextlib.suppress(StorageError):
                self.delete_file(_PROBE)
            raise
        self.delete_file(_PROBE)

    def delete_file(self, name: str) -> None:
        """Deletes a file, where there is one."""
        self._ask("delete", name, self._files.write(name, None))

    def delete_below(self, name: str) -> None:
        """Deletes the files below a folder."""
        if self._local is not None:
            self._delete_tree(f"{self._local}/{name}")
        else:
            files = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # 0 comes after the slash.
            self._ask("delete", name, self._files.delete_range(files))

    def delete(self) -> None:
        """Deletes all files, first the one that says that the others are complete.

        Links are deleted, and not what they lead to.

        Raises:
            StorageError: Something cannot be deleted.
        """
        if self._local is not None:
            self._delete_tree(self._local)
            return
        self.delete_file(MANIFEST)
        self._ask("delete", "", self._files.delete_range(ts.KvStore.KeyRange()))

    def _delete_tree(self, folder: str) -> None:
        try:
            files.delete_tree(folder, MANIFEST)
        except FileNotFoundError:
            return
        except OSError as error:
            said = error.strerror or error
            raise StorageError(f"{folder} cannot be deleted: {said}.") from error

    # -- arrays -------------------------------------------------------------------------------

    def create(self, name: str, shape: tuple[int, ...], dtype: str) -> ts.TensorStore:
        """Makes the place for a global array, or opens it where another rank has."""
        folder = folder_of_array(name)
        if self._local is not None:
            path = f"{self._kvstore['path']}{folder}/"
            where: Any = {"driver": "file", "path": path}
        else:
            where = f"{self._kvstore}{folder}/"
        spec = {
            "driver": "zarr3",
            "kvstore": where,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "metadata": metadata_of(shape, dtype, chunk_shape_of(shape, dtype)),
        }
        return self._ask("create", name, ts.open(spec, create=True, open=True))

    def write(self, array: ts.TensorStore, parts: Iterable[tuple[tuple, np.ndarray]]) -> None:
        """Writes boxes of an array, and returns when they are there."""
        waiting = [array[box].write(value) for box, value in parts]
        for each in waiting:
            self._ask("write", "an array", each)

    def _ask(self, what: str, name: str, future):
        """The result of a request; errors say what was asked."""
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise StorageError(f"{self.path}: cannot {what} `{name}`: {_first(error)}") from error


def _first(error: Exception) -> str:
    """What TensorStore says; what follows in brackets is for those who mend it."""
    return " ".join(str(error).split("[")[0].replace("\\x00", "/").split())
