"""What a checkpoint holds: written last, so that one without it does not count.

The manifest binds every file by size and digest, and itself by a digest: what was swapped, copied or
changed does not pass for what was written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zlib
from typing import Any

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
_STEPS = 1 << 62
#: Far beyond any array, and small enough to count with.
_SIZES = 1 << 48
_CHUNK_LIMIT = 1 << 30

#: Shape and dtype of an array.
Array = tuple[tuple[int, ...], str]
Arrays = dict[str, Array]
#: Size and digest of each file.
Digests = dict[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: The training step after which it was taken.
        arrays: By name, shape and dtype of each global array.
        state: What else there is: anything that JSON can hold.
        files: By path, size and digest of each file. None in a checkpoint of format 1.
        chunks: By name, the shape of an array's chunks.
    """

    step: int
    arrays: Arrays
    state: dict[str, Any]
    files: Digests | None = None
    chunks: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def chunk_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array's chunks."""
        return self.chunks.get(name) or chunk_shape_of(*self.arrays[name])

    def write(self, storage: Storage) -> None:
        """Writes it; from then on the checkpoint is complete."""
        content = {
            "step": self.step,
            "folder": storage.path.rpartition("/")[2],
            "arrays": {
                name: {"shape": list(shape), "dtype": dtype, "chunk": list(self.chunk_of(name))}
                for name, (shape, dtype) in self.arrays.items()
            },
            "files": {path: list(found) for path, found in (self.files or {}).items()},
            "state": self.state,
        }
        storage.write_json(
            MANIFEST,
            {"tfdist_checkpoint": FORMAT, "sha256": _digest(content), "content": content},
        )

    @classmethod
    def read(cls, storage: Storage) -> Manifest | None:
        """Reads it; None where there is none.

        Raises:
            StorageError: It is damaged, or that of another checkpoint.
            NewerFormatError: A newer tfdist wrote it.
        """
        found = storage.read_json(MANIFEST)
        if found is None:
            return None
        version: Any = found.get("tfdist_checkpoint") if isinstance(found, dict) else None
        if not _is_int(version, 1, _SIZES):
            raise _damaged(storage, "it is no manifest")
        if version > FORMAT:
            raise NewerFormatError(
                f"{storage.path} was written by a newer tfdist, in version {version} of the format. "
                f"This one reads versions up to {FORMAT}: install the newer one."
            )
        content = found.get("content")
        if not isinstance(content, dict):
            raise _damaged(storage, "it has no content")
        try:
            right = (
                found.get("crc32") == _crc(content)
                if version == 1
                else (found.get("sha256") == _digest(content))
            )
        except (ValueError, RecursionError) as error:
            raise _damaged(storage, str(error)) from error
        if not right:
            raise _damaged(storage, "its checksum is another")
        try:
            manifest = _parsed(content, version)
        except (ValueError, TypeError, OverflowError) as error:
            raise _damaged(storage, str(error)) from error
        _check_place(storage, content, manifest, version)
        return manifest


def format1() -> Any:
    """How checkpoints of format 1, which early versions wrote, are read.

    Raises:
        ImportError: Its add-on is not installed.
    """
    return require_addon("compat", "A checkpoint of format 1").checkpoint_format1


def folder_of(step: int, token: str) -> str:
    """The folder of a checkpoint; the token keeps two jobs that save at the same step apart."""
    return f"step-{step:010d}-{token}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint's folder; None where the name is not that of one."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else int(found[1])


def keys_of(name: str, array: Array, chunk: tuple[int, ...]) -> list[str]:
    """The files of an array, its description first."""
    folder = folder_of_array(name)
    keys = [f"{folder}/{key}" for _, key in chunk_keys(array[0], chunk)]
    return [f"{folder}/zarr.json", *keys]


def _parsed(content: dict[str, Any], version: int) -> Manifest:
    """The manifest in a JSON object; a `ValueError` says what is not as it is to be."""
    step: Any = content.get("step")
    if not _is_int(step, 0, _STEPS):
        raise ValueError(f"`step` is a number from 0 on, and is {step!r:.50}")
    state, found = _object(content, "state"), _object(content, "arrays")
    arrays: Arrays = {}
    chunks: dict[str, tuple[int, ...]] = {}
    for name, each in found.items():
        if version == 1:
            ok = isinstance(each, list) and len(each) == 2
            shape, dtype = each if ok else (None, None)
        else:
            each = each if isinstance(each, dict) else {}
            shape, dtype = each.get("shape"), each.get("dtype")
        arrays[name] = _array(name, shape, dtype)
        if version > 1:
            chunks[name] = _chunk(name, arrays[name], each.get("chunk"))
        elif not all(part.strip(".") for part in name.split("/")) or "\0" in name:
            raise ValueError(f"`{name!r:.50}` is not the name of an array")
    files = None if version == 1 else _files(_object(content, "files"), arrays, chunks)
    return Manifest(step, arrays, state, files, chunks)


def _object(content: dict[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"`{name}` is an object, and is {found!r:.50}")
    return found


def _array(name: str, shape, dtype) -> Array:
    if not (
        isinstance(shape, list)
        and len(shape) <= 32
        and all(_is_int(size, 0, _SIZES) for size in shape)
        and math.prod(shape) <= _SIZES
    ):
        raise ValueError(f"the array `{name}` has no shape, but {shape!r:.50}")
    if not isinstance(dtype, str):
        raise ValueError(f"the array `{name}` has no dtype, but {dtype!r:.50}")
    try:
        item_bytes(dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the array `{name}` has no dtype, but {dtype!r:.50}") from error
    return tuple(shape), dtype


def _chunk(name: str, array: Array, chunk) -> tuple[int, ...]:
    shape, dtype = array
    if not (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(_is_int(part, 1, max(1, size)) for part, size in zip(chunk, shape, strict=True))
        and math.prod(chunk) * item_bytes(dtype) <= _CHUNK_LIMIT
    ):
        raise ValueError(f"the array `{name}` has no shape of chunks, but {chunk!r:.50}")
    return tuple(chunk)


def _files(found: dict[str, Any], arrays: Arrays, chunks: dict[str, tuple[int, ...]]) -> Digests:
    """The files: those that the arrays have, and no other."""
    files: Digests = {}
    for path, each in found.items():
        ok = (
            isinstance(each, list)
            and len(each) == 2
            and _is_int(each[0], 0, _CHUNK_LIMIT + CRC_BYTES)
            and isinstance(each[1], str)
        )
        if not ok:
            raise ValueError(f"the file `{path}` has no size and digest, but {each!r:.50}")
        files[path] = (each[0], each[1])
    count = sum(1 + chunk_count(arrays[name][0], chunks[name]) for name in arrays)
    if count != len(files):
        raise ValueError(f"it lists {len(files):,} files, and its arrays have {count:,}")
    for name, array in arrays.items():
        for key in keys_of(name, array, chunks[name]):
            if key not in files:
                raise ValueError(f"it does not list the file `{key}`")
    return files


def _check_place(storage: Storage, content: dict, manifest: Manifest, version: int) -> None:
    """Raises where a checkpoint does not lie where it was written.

    A folder that the user gave a name of their own is what they say it is.
    """
    here = storage.path.rstrip("/").rpartition("/")[2]
    step = step_of(here)
    if step is None:
        return
    if step != manifest.step:
        raise _damaged(storage, f"it is that of step {manifest.step}")
    if version > 1 and content.get("folder") != here:
        raise _damaged(storage, f"it is that of `{content.get('folder')!s:.100}`")


def _is_int(value, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _damaged(storage: Storage, what: str) -> StorageError:
    return StorageError(f"{storage.path}/{MANIFEST} is damaged: {what}.")


def _digest(content) -> str:
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _crc(content) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
