"""Reads back what was written, and digests it: a bad write is found before the manifest is written."""

from __future__ import annotations

import itertools

import numpy as np

from tfdist.checkpoint.chunks import (
    CHUNK_BYTES,
    CRC_BYTES,
    check_equal,
    chunk_keys,
    chunk_shape_of,
    decode,
    folder_of_array,
)
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import Digests
from tfdist.checkpoint.storage import Storage, digest_of


def read_back(
    storage: Storage,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    value: np.ndarray | None = None,
    *,
    place: int = 0,
    count: int = 1,
) -> Digests:
    """Size and digest of the files of an array: each `count`th of them, from `place` on.

    They are compared with `value`, the whole array; where that is None only checksums can tell. A
    file that is not what was written is a `StorageError`.
    """
    chunk = chunk_shape_of(shape, dtype)
    folder = folder_of_array(name)
    keys = [(None, "zarr.json"), *chunk_keys(shape, chunk)]
    found: Digests = {}
    for at, key in itertools.islice(keys, place, None, count):
        path = f"{folder}/{key}"
        content = storage.read(path, CHUNK_BYTES + CRC_BYTES)
        if content is None:
            raise StorageError(f"{storage.path}/{path} was written, and is not there.")
        if at is not None:
            try:
                numbers = decode(content, chunk, dtype, checks=value is None)
                if value is not None:
                    check_equal(numbers, at, value)
            except StorageError as error:
                raise StorageError(
                    f"{storage.path}/{path} was written, and is damaged: {error}."
                ) from error
        found[path] = (len(content), digest_of(content))
    return found
