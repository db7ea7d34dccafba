"""Arrays of Keras' weight files that are read on demand, and in part.

Keras reads each array of a file completely before it is assigned. Inside `arrays_on_demand` its stores
return `StoredArray`s instead. `H5IOStore.__getitem__` is internal to Keras;
`tests/backend/keras/test_stored.py` fails if it changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.backend.keras.attributes import Attribute
from tfdist.backend.keras.private import h5_dataset, saving_lib
from tfdist.utils.temporary import attributes_set

_entry = Attribute("_h5_entry_group", saving_lib.H5IOStore)


@dataclasses.dataclass(frozen=True)
class StoredArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of an HDF5 file, which is read when it is used as a NumPy array.

    Attributes:
        file: The path of the file.
        name: The dataset's name in the file.
        shape: The array's shape.
        dtype: The array's dtype.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: Any

    def read(self, index: Any = ()) -> np.ndarray:
        """Reads the array, or the part that an index selects."""
        import h5py

        with h5py.File(self.file, "r") as file:
            found = np.asarray(file[self.name][index])
        # Dtypes that NumPy does not define are stored as bytes.
        return found.view(self.dtype) if found.dtype.kind == "V" else found

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(index)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Markers and protocols that others look up.
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        arrays = [np.asarray(x) if isinstance(x, StoredArray) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        found = self.read()
        return found if dtype is None else found.astype(dtype)


def _stored(store, key: str) -> StoredArray | None:
    """An array of a store that is a file; None for other stores, such as archives."""
    dataset = h5_dataset(store, _entry(store), key)
    file = dataset.file.filename
    if store.archive or not os.path.isfile(file):
        return None
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else dataset.dtype)
    return StoredArray(file, dataset.name, tuple(dataset.shape), dtype)


def arrays_on_demand() -> contextlib.AbstractContextManager[None]:
    """Has files of weights return `StoredArray`s inside; archives and buffers return arrays as usual."""
    stock = saving_lib.H5IOStore.__getitem__

    def get(store, key):
        found = _stored(store, key)
        return stock(store, key) if found is None else found

    return attributes_set(saving_lib.H5IOStore, __getitem__=get)
