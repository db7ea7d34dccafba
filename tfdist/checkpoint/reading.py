"""Reads boxes of a checkpoint's arrays; nothing is believed that the manifest does not bind."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from tfdist.checkpoint.chunks import Box, copy_chunk, decode, folder_of_array, touched
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import Manifest, format1
from tfdist.checkpoint.storage import Storage, digest_of

#: Chunks that are in memory at a time, beside the arrays that they are copied into.
_CHUNKS_AT_A_TIME = min(4, os.cpu_count() or 1)


class Reader:
    """Reads the arrays of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest):
        self._storage, self._manifest = storage, manifest

    def read(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Boxes of an array; where an index stands for an axis, the result lacks it.

        A file that is missing, or is not what was written, is a `StorageError`.
        """
        shape, dtype = self._manifest.arrays[name]
        chunk = self._manifest.chunk_of(name)
        self._check_description(name)
        places = touched(boxes, shape, chunk)
        kind = ts.dtype(dtype).numpy_dtype
        targets = [
            np.empty([each.stop - each.start for each in box if isinstance(each, slice)], kind)
            for box in boxes
        ]

        def fetch(found: tuple[tuple[int, ...], str]) -> None:
            place, key = found
            copy_chunk(self._chunk(name, key, chunk, dtype), place, boxes, targets)

        if len(places) < 2:
            for each in places:
                fetch(each)
        else:
            with concurrent.futures.ThreadPoolExecutor(_CHUNKS_AT_A_TIME) as threads:
                for done in [threads.submit(fetch, each) for each in places]:
                    done.result()
        return targets

    def _check_description(self, name: str) -> None:
        if self._manifest.files is None:
            array = self._manifest.arrays[name]
            format1().check_description(self._storage, name, array)
        else:
            self._bound(f"{folder_of_array(name)}/zarr.json")

    def _chunk(self, name: str, key: str, chunk: tuple[int, ...], dtype: str) -> np.ndarray:
        if self._manifest.files is None:
            return format1().chunk_values(self._storage, name, key, chunk, dtype)
        path = f"{folder_of_array(name)}/{key}"
        try:
            return decode(self._bound(path), chunk, dtype, checks=False)
        except ValueError as error:  # The manifest's own numbers do not fit together.
            raise StorageError(f"{self._storage.path}/{path} is damaged: {error}.") from error

    def _bound(self, path: str) -> bytes:
        """The content of a file that the manifest binds."""
        size, digest = (self._manifest.files or {})[path]
        content = self._storage.read(path, size)
        where = f"{self._storage.path}/{path}"
        if content is None:
            raise StorageError(f"{where} is missing.")
        if len(content) != size:
            raise StorageError(
                f"{where} is damaged: it has {len(content):,} bytes, {size:,} were written."
            )
        if digest_of(content) != digest:
            raise StorageError(f"{where} is damaged: its content is not what was written.")
        return content
