"""How a global array is cut into chunks, and what the bytes of a chunk mean.

The layout is that of zarr 3 with the codecs `bytes` (little endian) and `crc32c`, so that any reader of
zarr can open an array; a chunk at the edge is as long as any other.
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

#: A chunk is the unit of reading, of digests and of what several ranks may write at once.
CHUNK_BYTES = 16 << 20
#: What the codec `crc32c` appends.
CRC_BYTES = 4
#: File systems take no longer names; some room is left for what TensorStore appends.
_NAME_BYTES = 200
#: The files of an array, for which no array below it may be taken.
_OWN_NAMES = ("c", "zarr.json")


def item_bytes(dtype: str) -> int:
    """The bytes of one number; a `ValueError` for a dtype whose numbers have no fixed size."""
    found = ts.dtype(dtype).numpy_dtype
    if found.hasobject or found.itemsize < 1:
        raise ValueError(f"`{dtype}` is not the dtype of numbers.")
    return found.itemsize


def chunk_shape_of(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape of a chunk: rows, as many as fit, or parts of a row."""
    left = max(1, CHUNK_BYTES // item_bytes(dtype))
    found: list[int] = []
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        part = min(max(size, 1), max(1, left // max(inner, 1)))
        found.append(part)
        left = max(1, left // part)
    return tuple(found)


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """How many chunks there are; none of an array without numbers."""
    return math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))


def folder_of_array(name: str) -> str:
    """Where the files of an array lie in its checkpoint.

    A name may have been chosen by a user, so nothing in it may lead elsewhere.
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


def chunk_keys(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The place of each chunk in the grid, and its file below the array's folder."""
    grid = [range(-(-size // part)) for size, part in zip(shape, chunk, strict=True)]
    for place in itertools.product(*grid):
        yield place, "/".join(["c", *map(str, place)])


def metadata_of(shape: Sequence[int], dtype: str, chunk: Sequence[int]) -> dict[str, Any]:
    """What `zarr.json` says of an array."""
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }


def decode(content: bytes, chunk: Sequence[int], dtype: str, *, checks: bool) -> np.ndarray:
    """The numbers of a chunk, from the bytes of its file; a `StorageError` if they are damaged.

    The checksum at its end is compared where `checks` says so; not where a digest was.
    """
    expected = math.prod(chunk) * item_bytes(dtype) + CRC_BYTES
    if len(content) != expected:
        raise StorageError(f"it has {len(content):,} bytes, {expected:,} are right")
    if checks:
        return _checked(content, chunk, dtype)
    kind = ts.dtype(dtype).numpy_dtype
    return np.frombuffer(content, kind, math.prod(chunk)).reshape(chunk)


def _checked(content: bytes, chunk: Sequence[int], dtype: str) -> np.ndarray:
    """Has TensorStore decode it from memory: Python has no CRC-32C."""
    memory = {"driver": "memory", "path": "chunk/"}
    context = ts.Context()
    files = ts.KvStore.open(memory, context=context).result()
    files.write("/".join(["c", *("0" for _ in chunk)]), content).result()
    spec = {"driver": "zarr3", "kvstore": memory, "metadata": metadata_of(chunk, dtype, chunk)}
    try:
        array = ts.open(spec, create=True, context=context).result()
        return array.read().result()
    except ValueError as error:
        raise StorageError("its checksum is another") from error


def check_equal(found: np.ndarray, place: Sequence[int], value: np.ndarray) -> None:
    """Raises StorageError where a chunk does not hold, bit for bit, what lies there in an array.

    `place` is the chunk's place in the grid, and `value` the whole array.
    """
    edges = [
        (at * part, min((at + 1) * part, size))
        for at, part, size in zip(place, found.shape, value.shape, strict=True)
    ]
    right = value[tuple(slice(begin, end) for begin, end in edges)]
    inside = found[tuple(slice(0, end - begin) for begin, end in edges)]
    if not np.array_equal(_bits(inside), _bits(right)):
        raise StorageError("it holds something else")


def _bits(value: np.ndarray) -> np.ndarray:
    """The bytes of an array, eight at a time where they come out even."""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return flat if len(flat) % 8 else flat.view(np.uint64)


def touched(
    boxes: Sequence[Box], shape: Sequence[int], chunk: Sequence[int]
) -> list[tuple[tuple[int, ...], str]]:
    """The chunks in which some of the boxes of an array lie, each once, with their files."""
    found: dict[tuple[int, ...], None] = {}
    for box in boxes:
        edges = [_edges(each) for each in box]
        if any(end <= begin for begin, end in edges):
            continue
        grid = [
            range(begin // part, (end - 1) // part + 1)
            for (begin, end), part in zip(edges, chunk, strict=True)
        ]
        found.update(dict.fromkeys(itertools.product(*grid)))
    return [(place, "/".join(["c", *map(str, place)])) for place in found]


def copy_chunk(
    values: np.ndarray, place: Sequence[int], boxes: Sequence[Box], targets: Sequence[np.ndarray]
) -> None:
    """Copies what lies in a chunk into the arrays of the boxes.

    `place` is the chunk's place in the grid. Where an index stands for an axis, the box lacks it.
    """
    for box, target in zip(boxes, targets, strict=True):
        source: list[slice | int] = []
        goal: list[slice] = []
        for each, at, part in zip(box, place, values.shape, strict=True):
            begin, end = _edges(each)
            first, last = max(begin, at * part), min(end, (at + 1) * part)
            if last <= first:
                break
            if isinstance(each, slice):
                source.append(slice(first - at * part, last - at * part))
                goal.append(slice(first - begin, last - begin))
            else:
                source.append(first - at * part)
        else:
            target[tuple(goal)] = values[tuple(source)]


def _edges(each: slice | int) -> tuple[int, int]:
    return (each.start, each.stop) if isinstance(each, slice) else (each, each + 1)
