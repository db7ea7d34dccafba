"""Reads boxes of a checkpoint's arrays, and verifies all that is read against the manifest."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from tfdist.checkpoint.chunks import (
    Box,
    Place,
    chunk_key,
    copy_chunk,
    decode,
    folder_of_array,
    touched,
)
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.storage import Storage

#: How many chunks may be in memory at a time, in addition to the arrays that they are copied into.
_MAX_CHUNKS = min(4, os.cpu_count() or 1)


class Reader:
    """Reads the arrays of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest):
        self._storage, self._manifest = storage, manifest

    def read(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Reads boxes of an array; an axis with an index in place of a slice is dropped.

        Raises:
            StorageError: A file is missing or corrupt.
        """
        _, dtype = self._manifest.arrays[name]
        chunk = self._manifest.chunk_of(name)
        self._manifest.read_file(self._storage, name, "zarr.json")
        kind = ts.dtype(dtype).numpy_dtype
        targets = [
            np.empty([each.stop - each.start for each in box if isinstance(each, slice)], kind)
            for box in boxes
        ]

        def fetch(place: Place) -> None:
            copy_chunk(self._chunk(name, place, chunk, dtype), place, boxes, targets)

        places = touched(boxes, chunk)
        if len(places) == 1:
            fetch(*places)
        elif places:
            with concurrent.futures.ThreadPoolExecutor(_MAX_CHUNKS) as threads:
                list(threads.map(fetch, places))
        return targets

    def _chunk(self, name: str, place: Place, chunk: tuple[int, ...], dtype: str) -> np.ndarray:
        key = chunk_key(place)
        content = self._manifest.read_file(self._storage, name, key)
        try:
            return decode(content, chunk, dtype, checks=False)
        except (StorageError, ValueError) as error:  # The manifest contradicts itself.
            raise StorageError(
                f"{self._storage.path}/{folder_of_array(name)}/{key} is corrupt: {error}."
            ) from error
