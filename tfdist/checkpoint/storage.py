"""The files of a checkpoint, on disk or in an object store; arrays are written by TensorStore."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tfdist.checkpoint import files
from tfdist.checkpoint.chunks import CHUNK_BYTES, chunk_shape_of, folder_of_array, metadata_of
from tfdist.checkpoint.errors import CorruptFileError, StorageError
from tfdist.runtime.directories import is_address

#: Written last: a checkpoint with this file is complete.
MANIFEST = "manifest.json"
#: Written first, and deleted after the manifest was written.
UNFINISHED = "unfinished"

#: The size limit of a small file. A manifest has some 200 bytes for each array.
_JSON_BYTES = 256 << 20
#: Of TensorStore, by the scheme of an address.
_DRIVERS = {"gs": "gcs", "s3": "s3"}
#: A request to a store is given up after some two minutes: TensorStore would go on for a quarter of an hour.
_RETRIES = {"max_retries": 12, "initial_delay": "500ms", "max_delay": "16s"}
#: Written and deleted to test whether a folder is writable.
_PROBE = "probe"


def digest_of(content: bytes) -> str:
    """The digest of a file's content in a manifest. Hashing releases Python's global lock."""
    return hashlib.sha256(content).hexdigest()


class Storage:
    """The files below a folder, or below an address such as `gs://bucket/folder`.

    Every method raises a StorageError if a file cannot be accessed or is corrupt.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self._local: str | None = None
        if is_address(self.path):
            self.path = self.path.rstrip("/")
        else:
            self._local = os.path.abspath(self.path)
        try:
            self._files = ts.KvStore.open(self._below("")).result()
        except (ValueError, OSError, NotImplementedError) as error:
            raise StorageError(f"{self.path} cannot be opened: {_first(error)}") from error

    def _below(self, folder: str) -> Any:
        """TensorStore's specification of a folder, whose name ends with a slash."""
        if self._local is None:
            return _in_store(self.path, folder)
        return {"driver": "file", "path": f"{self._local.rstrip('/')}/{folder}"}

    # -- small files --------------------------------------------------------------------------

    def write_json(self, name: str, value) -> None:
        """Writes a small file atomically."""
        self._ask("write", name, self._files.write(name, json.dumps(value, indent=1)))

    def read_json(self, name: str):
        """The content of a small file; None if there is none."""
        content = self.read(name, _JSON_BYTES)
        if content is None:
            return None
        try:
            return json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"{self.path}/{name} is corrupt: {error}.") from error

    def read(self, name: str, limit: int = CHUNK_BYTES) -> bytes | None:
        """The content of a file of at most `limit` bytes; None if there is none."""
        if self._local is not None:
            return files.read_file(self._local, name, limit)
        content, _ = self.read_version(name)
        if content is not None and len(content) > limit:
            raise files.too_long(f"{self.path}/{name}", len(content), limit)
        return content

    def read_version(self, name: str) -> tuple[bytes | None, bytes]:
        """The content of a small file, None if there is none, and its version."""
        found = self._ask("read", name, self._files.read(name))
        content = None if found.state == "missing" else found.value
        return content, found.stamp.generation

    def write_version(self, name: str, content: bytes | None, version: bytes) -> bytes | None:
        """Writes a small file, or deletes it if `content` is None, if it still has `version`.

        Returns:
            The new version; None if the file had another one, and was not changed.
        """
        done = self._ask("write", name, self._files.write(name, content, if_equal=version))
        return done.generation or None

    def names(self, prefix: str) -> list[str]:
        """The names of the files that begin with a prefix."""
        # The end of the range is the first name after all those with the prefix.
        keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        found = self._files.list(keys)
        return [key.decode(errors="replace") for key in self._ask("list", prefix, found)]

    def check_writable(self) -> None:
        """Raises StorageError if nothing can be written. Leaves no file behind."""
        try:
            self.write_json(_PROBE, None)
        except StorageError:
            with contextlib.suppress(StorageError):
                self.delete_file(_PROBE)
            raise
        self.delete_file(_PROBE)

    def delete_file(self, name: str) -> None:
        """Deletes a file, if it exists."""
        self._ask("delete", name, self._files.write(name, None))

    def delete_below(self, name: str) -> None:
        """Deletes the files below a folder."""
        if self._local is not None:
            self._delete_tree(f"{self._local}/{name}")
        else:
            keys = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" is the successor of "/".
            self._ask("delete", name, self._files.delete_range(keys))

    def delete(self) -> None:
        """Deletes all files, the manifest first. Links are not followed."""
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
        """Creates a global array, or opens it if another rank has created it."""
        spec = {
            "driver": "zarr3",
            "kvstore": self._below(f"{folder_of_array(name)}/"),
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "metadata": metadata_of(shape, dtype, chunk_shape_of(shape, dtype)),
        }
        return self._ask("create", name, ts.open(spec, create=True, open=True))

    def write(self, array: ts.TensorStore, parts: Iterable[tuple[tuple, np.ndarray]]) -> None:
        """Writes boxes of an array, and returns when they are written."""
        waiting = [array[box].write(value) for box, value in parts]
        for each in waiting:
            self._ask("write", "an array", each)

    def _ask(self, what: str, name: str, future):
        """The result of a request; the message of an error names the request."""
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise StorageError(
                f"Could not {what} `{name}` in {self.path}: {_first(error)}"
            ) from error


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a file, on disk or in an object store.

    Raises:
        OSError: It cannot be read; a StorageError, if it is in a store.
    """
    path = os.fspath(path)
    if not is_address(path):
        return Path(path).expanduser().read_bytes()
    folder, _, name = path.rpartition("/")
    content, _ = Storage(folder).read_version(name)
    if content is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return content


def _in_store(path: str, folder: str) -> dict[str, Any] | str:
    """TensorStore's specification of a folder in an object store."""
    scheme, _, address = path.partition("://")
    if scheme not in _DRIVERS:
        return f"{path}/{folder}"
    bucket, _, rest = address.partition("/")
    driver = _DRIVERS[scheme]
    return {
        "driver": driver,
        "bucket": bucket,
        "path": f"{rest}/{folder}" if rest else folder,
        f"{driver}_request_retries": _RETRIES,
        **(_s3_options() if scheme == "s3" else {}),
    }


def _s3_options() -> dict[str, Any]:
    """The options of S3, by the variables of Amazon's tools.

    TensorStore itself does not read those of endpoint and region, and looks for a profile before the keys.
    """
    found: dict[str, Any] = {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        found = {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        found["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        found["aws_credentials"] = {"type": "environment"}
    return found


def _first(error: Exception) -> str:
    """TensorStore's message without the details for its developers, which follow in brackets."""
    return " ".join(str(error).split("[")[0].replace("\\x00", "/").split())
