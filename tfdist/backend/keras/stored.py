"""Arrays of Keras' weight files that are not read before they are needed, and then in part.

Keras reads each array of a file whole before it is assigned. Inside `arrays_on_demand` its stores
give `StoredArray`s instead. `H5IOStore.__getitem__` and what it reads by are Keras' own;
`tests/backend/keras/test_stored.py` fails where they move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.backend.keras.attributes import Attribute
from tfdist.backend.keras.private import h5_dataset, saving_lib

_entry = Attribute("_h5_entry_group", saving_lib.H5IOStore)


@dataclasses.dataclass(frozen=True)
class StoredArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of an HDF5 file, which is read by whatever takes it for a NumPy array.

    Attributes:
        file: The path of the file.
        name: The data set's name in it.
        shape: Its shape.
        dtype: Its dtype.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: Any

    def read(self, index: Any = ()) -> np.ndarray:
        """Reads the array, or what an index selects of it."""
        import h5py

        with h5py.File(self.file, "r") as file:
            found = np.asarray(file[self.name][index])
        # What NumPy knows no name of is stored as bytes.
        return found.view(self.dtype) if found.dtype.kind == "V" else found

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(index)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Marks and protocols that others look for.
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        arrays = [np.asarray(x) if isinstance(x, StoredArray) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        found = self.read()
        return found if dtype is None else found.astype(dtype)


def _stored(store, key: str) -> StoredArray | None:
    """An array of a store that is a file; None for other stores, as archives are."""
    dataset = h5_dataset(store, _entry(store), key)
    file = dataset.file.filename
    if store.archive or not os.path.isfile(file):
        return None
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else dataset.dtype)
    return StoredArray(file, dataset.name, tuple(dataset.shape), dtype)


@contextlib.contextmanager
def arrays_on_demand() -> Iterator[None]:
    """Inside, files of weights give `StoredArray`s; archives and buffers give arrays, as ever."""
    kind = saving_lib.H5IOStore
    stock = kind.__getitem__

    def get(store, key):
        found = _stored(store, key)
        return stock(store, key) if found is None else found

    kind.__getitem__ = get
    try:
        yield
    finally:
        kind.__getitem__ = stock
