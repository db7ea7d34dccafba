"""Arrays of weight files that are read when they are needed."""

from __future__ import annotations

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tfdist.backend.keras.private import saving_lib
from tfdist.backend.keras.stored import StoredArray, arrays_on_demand

VALUE = np.arange(12.0, dtype="float32").reshape(3, 4)


def write(store, value=VALUE) -> None:
    store.make("layer")["0"] = value
    store.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_array_of_a_file_is_read_in_part(tmp_path, dtype):
    value = VALUE.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    write(saving_lib.H5IOStore(tmp_path / "x.weights.h5", mode="w"), value)
    store = saving_lib.H5IOStore(tmp_path / "x.weights.h5")
    with arrays_on_demand():
        found = store.get("layer")["0"]
    assert isinstance(found, StoredArray)
    assert (found.shape, found.dtype, len(found)) == (value.shape, value.dtype, 3)
    np.testing.assert_array_equal(found.read((slice(1, 3), slice(0, 2))), value[1:3, :2])
    np.testing.assert_array_equal(np.asarray(found), value)
    store.close()


def test_what_loaders_do_with_arrays_they_do_with_these(tmp_path):
    write(saving_lib.H5IOStore(tmp_path / "x.weights.h5", mode="w"))
    store = saving_lib.H5IOStore(tmp_path / "x.weights.h5")
    with arrays_on_demand():
        found = store.get("layer")["0"]
    np.testing.assert_array_equal(2 * found + 1, 2 * VALUE + 1)
    np.testing.assert_array_equal(found.reshape(-1), VALUE.reshape(-1))
    np.testing.assert_array_equal(found.T[1:], VALUE.T[1:])
    assert found.astype("int32").dtype == "int32"
    store.close()


def test_archives_and_buffers_give_arrays(tmp_path):
    buffer = io.BytesIO()
    write(saving_lib.H5IOStore(buffer, mode="w"))
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        write(saving_lib.H5IOStore("x.weights.h5", archive=archive, mode="w"))
    with zipfile.ZipFile(tmp_path / "x.keras") as archive, arrays_on_demand():
        for store in (
            saving_lib.H5IOStore(buffer),
            saving_lib.H5IOStore("x.weights.h5", archive=archive),
        ):
            found = store.get("layer")["0"]
            assert isinstance(found, np.ndarray)
            np.testing.assert_array_equal(found, VALUE)
            store.close()


def test_keras_own_way_is_back_afterwards(tmp_path):
    before = saving_lib.H5IOStore.__getitem__
    with pytest.raises(RuntimeError), arrays_on_demand():
        raise RuntimeError
    assert saving_lib.H5IOStore.__getitem__ is before
