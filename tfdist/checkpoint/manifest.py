"""The manifest of a checkpoint, which is written last: a checkpoint without one is incomplete.

The manifest contains the size and digest of every file, and its own digest, so that files that were
exchanged, copied or changed are detected.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, ClassVar

from tfdist.checkpoint import names
from tfdist.checkpoint.chunks import (
    CRC_BYTES,
    chunk_count,
    chunk_keys,
    chunk_shape_of,
    folder_of_array,
    item_bytes,
)
from tfdist.checkpoint.errors import NewerFormatError, StorageError
from tfdist.checkpoint.storage import MANIFEST, Storage, digest_of
from tfdist.utils.lazy import require_addon

FORMAT = 2
_FOLDER = re.compile(r"step-(\d{10,19})-([0-9a-f]{1,64})", re.ASCII)
_MAX_STEP = 1 << 62
#: Far larger than any array, and small enough to calculate with.
_MAX_SIZE = 1 << 48
_MAX_CHUNK_BYTES = 1 << 30
_MAX_DIMS = 32

#: Shape and dtype of an array.
Array = tuple[tuple[int, ...], str]
Arrays = dict[str, Array]
Chunks = dict[str, tuple[int, ...]]
#: Size and digest of each file.
Digests = dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: The training step after which it was saved.
        arrays: Shape and dtype of each global array, by name.
        state: Other state, JSON-serializable.
        files: Size and digest of each file, by path.
        chunks: The shape of an array's chunks, by name.
        names: The functions that name the arrays of this format.
    """

    step: int
    arrays: Arrays
    state: dict[str, Any]
    files: Digests = dataclasses.field(default_factory=dict)
    chunks: Chunks = dataclasses.field(default_factory=dict)
    names: ClassVar[Any] = names

    def chunk_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array's chunks."""
        return self.chunks.get(name) or chunk_shape_of(*self.arrays[name])

    def write(self, storage: Storage) -> None:
        """Writes it, which completes the checkpoint."""
        content = {
            "step": self.step,
            "folder": storage.path.rpartition("/")[2],
            "arrays": {
                name: {"shape": list(shape), "dtype": dtype, "chunk": list(self.chunk_of(name))}
                for name, (shape, dtype) in self.arrays.items()
            },
            "files": {path: list(found) for path, found in self.files.items()},
            "state": self.state,
        }
        storage.write_json(
            MANIFEST,
            {"tfdist_checkpoint": FORMAT, "sha256": _digest(content), "content": content},
        )

    def read_file(self, storage: Storage, name: str, key: str) -> bytes:
        """The content of an array's file, which must be the one that the manifest lists.

        Raises:
            StorageError: It is missing or corrupt.
        """
        path = f"{folder_of_array(name)}/{key}"
        size, digest = self.files[path]
        content = storage.read(path, size)
        where = f"{storage.path}/{path}"
        if content is None:
            raise StorageError(f"{where} is missing.")
        if len(content) != size:
            raise StorageError(
                f"{where} is corrupt: expected {size:,} bytes, found {len(content):,} bytes."
            )
        if digest_of(content) != digest:
            raise StorageError(f"{where} is corrupt: digest mismatch.")
        return content

    @classmethod
    def read(cls, storage: Storage) -> Manifest | None:
        """Reads it; None if there is none.

        Raises:
            StorageError: It is corrupt, or belongs to a different checkpoint.
            NewerFormatError: It was written by a newer version of tfdist.
        """
        found = storage.read_json(MANIFEST)
        if found is None:
            return None
        try:
            return _parsed(found, storage)
        except NewerFormatError:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StorageError(f"{storage.path}/{MANIFEST} is corrupt: {error}.") from error

    @staticmethod
    def has_right_digest(found: dict[str, Any], content: dict[str, Any]) -> bool:
        """Whether a parsed manifest has the digest of its content."""
        return found.get("sha256") == _digest(content)

    @classmethod
    def parsed(
        cls, step: int, listed: dict[str, Any], state: dict[str, Any], content: dict[str, Any]
    ) -> Manifest:
        """The manifest with the arrays that its content lists.

        Raises:
            ValueError: They are not valid.
        """
        arrays, chunks = {}, {}
        for name in listed:
            each = json_object(listed, name)
            arrays[name] = array_of(name, each.get("shape"), each.get("dtype"))
            chunks[name] = _chunk(name, arrays[name], each.get("chunk"))
        files = _files(json_object(content, "files"), arrays, chunks)
        return cls(step, arrays, state, files, chunks)


def folder_of(step: int, token: str) -> str:
    """The folder of a checkpoint; the token distinguishes jobs that save at the same step."""
    return f"step-{step:010d}-{token}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None if the name is not that of a checkpoint."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else int(found[1])


def keys_of(name: str, array: Array, chunk: tuple[int, ...]) -> list[str]:
    """The files of an array, its description first."""
    folder = folder_of_array(name)
    keys = [f"{folder}/{key}" for _, key in chunk_keys(array[0], chunk)]
    return [f"{folder}/zarr.json", *keys]


def _parsed(found: Any, storage: Storage) -> Manifest:
    """The manifest in a JSON value.

    Raises:
        ValueError: It is corrupt; the message names the entry.
        NewerFormatError: It was written by a newer version of tfdist.
    """
    version: Any = found.get("tfdist_checkpoint") if isinstance(found, dict) else None
    require(_is_int(version, 1, _MAX_SIZE), "it is not a manifest")
    if version > FORMAT:
        raise NewerFormatError(
            f"{storage.path} is not supported: it was written by a newer tfdist, in version {version} "
            f"of the format. This tfdist reads versions up to {FORMAT}. Install the newer one."
        )
    content = json_object(found, "content")
    form: Any = Manifest
    if version == 1:
        form = require_addon("compat", "A checkpoint of format 1").checkpoint_format1.Format1
    require(form.has_right_digest(found, content), "checksum mismatch")
    step: Any = content.get("step")
    require(_is_int(step, 0, _MAX_STEP), f"`step` must be at least 0, found {step!r:.50}")
    listed = json_object(content, "arrays")
    manifest = form.parsed(step, listed, json_object(content, "state"), content)
    # A folder that the user has renamed is not compared.
    here = storage.path.rstrip("/").rpartition("/")[2]
    if step_of(here) is not None:
        require(step_of(here) == step, f"it belongs to step {step}")
        folder = content.get("folder")
        require(version == 1 or folder == here, f"it belongs to `{folder!s:.100}`")
    return manifest


def require(condition: bool, message: str) -> None:
    """Raises a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def json_object(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An entry that must be a JSON object; a ValueError says what it is instead."""
    found = content.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"`{name:.100}` must be an object, found {found!r:.50}")
    return found


def pair_of(value: Any) -> tuple[Any, Any]:
    """The two items of a list; None for both of any other value."""
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else (None, None)


def array_of(name: str, shape, dtype) -> Array:
    """Shape and dtype as an array; a ValueError names the array if they are not valid."""
    is_shape = (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMS
        and all(_is_int(size, 0, _MAX_SIZE) for size in shape)
        and math.prod(shape) <= _MAX_SIZE
    )
    require(is_shape, f"the array `{name}` has an invalid shape: {shape!r:.50}")
    try:
        item_bytes(dtype if isinstance(dtype, str) else "")
    except (ValueError, TypeError) as error:
        raise ValueError(f"the array `{name}` has an invalid dtype: {dtype!r:.50}") from error
    return tuple(shape), dtype


def _chunk(name: str, array: Array, chunk) -> tuple[int, ...]:
    shape, dtype = array
    is_chunk = (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(_is_int(part, 1, max(1, size)) for part, size in zip(chunk, shape, strict=True))
        and math.prod(chunk) * item_bytes(dtype) <= _MAX_CHUNK_BYTES
    )
    require(is_chunk, f"the array `{name}` has an invalid shape of chunks: {chunk!r:.50}")
    return tuple(chunk)


def _files(found: dict[str, Any], arrays: Arrays, chunks: Chunks) -> Digests:
    """The files, which must be exactly those of the arrays."""
    files: Digests = {}
    for path, each in found.items():
        size, digest = pair_of(each)
        is_right = _is_int(size, 0, _MAX_CHUNK_BYTES + CRC_BYTES) and isinstance(digest, str)
        require(is_right, f"the file `{path}` has an invalid size or digest: {each!r:.50}")
        files[path] = (size, digest)
    # Counted first: a corrupt manifest may declare more chunks than can be listed.
    count = sum(1 + chunk_count(arrays[name][0], chunks[name]) for name in arrays)
    require(count == len(files), f"it lists {len(files):,} files, but its arrays have {count:,}")
    for name, array in arrays.items():
        for key in keys_of(name, array, chunks[name]):
            require(key in files, f"the file `{key}` is not listed")
    return files


def _is_int(value, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _digest(content) -> str:
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
