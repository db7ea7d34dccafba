"""How a global array is split into chunks, and the content of a chunk's file.

The layout is zarr 3 with the codecs `bytes` (little endian) and `crc32c`, so any zarr reader can open an
array. Chunks at the edge of an array are padded to the full size.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from tfdist.checkpoint.errors import StorageError

Box = tuple[slice | int, ...]
Place = tuple[int, ...]

#: A chunk is the unit of reading, of digests and of parallel writes by several ranks.
CHUNK_BYTES = 16 << 20
#: The size of the checksum that the codec `crc32c` appends.
CRC_BYTES = 4
#: Below the limit of file systems, with room for TensorStore's suffixes.
_NAME_BYTES = 200
#: Names of an array's own files, which no array below it may use.
_OWN_NAMES = ("c", "zarr.json")


def item_bytes(dtype: str) -> int:
    """The size of one element in bytes.

    Raises:
        ValueError: Elements of this dtype have no fixed size.
    """
    found = ts.dtype(dtype).numpy_dtype
    if found.hasobject or found.itemsize < 1:
        raise ValueError(f"`{dtype}` is not a numeric dtype.")
    return found.itemsize


def chunk_shape_of(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape of a chunk: the largest number of whole rows that fits, or a part of a row."""
    left = max(1, CHUNK_BYTES // item_bytes(dtype))
    found: list[int] = []
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        part = min(max(size, 1), max(1, left // max(inner, 1)))
        found.append(part)
        left = max(1, left // part)
    return tuple(found)


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """The number of chunks; zero for an array without elements."""
    return math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))


def folder_of_array(name: str) -> str:
    """The folder of an array's files in its checkpoint.

    Users choose names, so no name may lead out of the checkpoint.
    """
    return "arrays/" + "/".join(_safe(part) for part in name.split("/"))


def _safe(part: str) -> str:
    if part in _OWN_NAMES or not part.strip("."):
        return "".join(f"%{ord(letter):02X}" for letter in part) or "%"
    found = urllib.parse.quote(part, safe=" ()[]{}<>=+,;@", errors="surrogatepass")
    if len(found) <= _NAME_BYTES:
        return found
    digest = hashlib.sha256(found.encode()).hexdigest()[:32]
    return f"{found[: _NAME_BYTES - 40]}~{digest}"


def chunk_keys(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[Place, str]]:
    """The index of each chunk in the grid, and its file below the array's folder."""
    grid = [range(-(-size // part)) for size, part in zip(shape, chunk, strict=True)]
    for place in itertools.product(*grid):
        yield place, chunk_key(place)


def chunk_key(place: Place) -> str:
    """The file of a chunk below the array's folder, by its index in the grid."""
    return "/".join(["c", *map(str, place)])


def metadata_of(shape: Sequence[int], dtype: str, chunk: Sequence[int]) -> dict[str, Any]:
    """The description of an array in zarr's terms."""
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def decode(content: bytes, chunk: Sequence[int], dtype: str, *, checks: bool) -> np.ndarray:
    """Decodes a chunk from the bytes of its file.

    Args:
        content: The bytes.
        chunk: The shape of a chunk.
        dtype: The dtype.
        checks: Whether to verify the checksum at the end; not needed if a digest was verified.

    Raises:
        StorageError: The bytes are corrupt.
    """
    expected = math.prod(chunk) * item_bytes(dtype) + CRC_BYTES
    if len(content) != expected:
        raise StorageError(f"expected {expected:,} bytes, found {len(content):,} bytes")
    if checks:
        return _checked(content, chunk, dtype)
    kind = ts.dtype(dtype).numpy_dtype
    return np.frombuffer(content, kind, math.prod(chunk)).reshape(chunk)


def _checked(content: bytes, chunk: Sequence[int], dtype: str) -> np.ndarray:
    """Decodes a chunk in memory by TensorStore, because Python has no CRC-32C."""
    memory = {"driver": "memory", "path": "chunk/"}
    context = ts.Context()
    files = ts.KvStore.open(memory, context=context).result()
    files.write(chunk_key((0,) * len(chunk)), content).result()
    spec = {"driver": "zarr3", "kvstore": memory, "metadata": metadata_of(chunk, dtype, chunk)}
    try:
        return ts.open(spec, create=True, context=context).result().read().result()
    except ValueError as error:
        raise StorageError("checksum mismatch") from error


def check_equal(found: np.ndarray, place: Place, value: np.ndarray) -> None:
    """Raises StorageError if a chunk is not bitwise equal to its part of an array.

    Args:
        found: The chunk.
        place: Its index in the grid.
        value: The whole array.
    """
    begins = [at * part for at, part in zip(place, found.shape, strict=True)]
    # NumPy clips the slice at the end of the array.
    right = value[tuple(slice(b, b + part) for b, part in zip(begins, found.shape, strict=True))]
    inside = found[tuple(slice(size) for size in right.shape)]
    if not np.array_equal(_bits(inside), _bits(right)):
        raise StorageError("content mismatch")


def _bits(value: np.ndarray) -> np.ndarray:
    """The bytes of an array, as larger integers where possible, which compare faster."""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return flat if len(flat) % 8 else flat.view(np.uint64)


def touched(boxes: Sequence[Box], chunk: Sequence[int]) -> list[Place]:
    """The indices of the chunks that overlap at least one of some boxes of an array, each once."""
    found: dict[Place, None] = {}
    for box in boxes:
        edges = [_edges(each) for each in box]
        if all(begin < end for begin, end in edges):
            grid = [
                range(begin // part, (end - 1) // part + 1)
                for (begin, end), part in zip(edges, chunk, strict=True)
            ]
            found.update(dict.fromkeys(itertools.product(*grid)))
    return list(found)


def copy_chunk(
    values: np.ndarray, place: Place, boxes: Sequence[Box], targets: Sequence[np.ndarray]
) -> None:
    """Copies the content of a chunk into the arrays of the boxes that it overlaps.

    Args:
        values: The chunk.
        place: Its index in the grid.
        boxes: The boxes. An axis with an index in place of a slice is dropped from the box's array.
        targets: The array of each box.
    """
    for box, target in zip(boxes, targets, strict=True):
        source, goal = [], []
        for each, at, part in zip(box, place, values.shape, strict=True):
            begin, end = _edges(each)
            first, last = max(begin, at * part), min(end, (at + 1) * part)
            if last <= first:
                break
            source.append(slice(first - at * part, last - at * part))
            goal.append(slice(first - begin, last - begin))
        else:
            dropped = [axis for axis, each in enumerate(box) if not isinstance(each, slice)]
            whole = np.expand_dims(target, tuple(dropped))
            whole[tuple(goal)] = values[tuple(source)]


def _edges(each: slice | int) -> tuple[int, int]:
    return (each.start, each.stop) if isinstance(each, slice) else (each, each + 1)
