"""Models that were saved before modules moved load in a new process, without a prior import of their modules."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import keras
import pytest

import tfdist
from tests.house.sources import python_files, rooms
from tests.processes import python
from tfdist.backend.keras.registered import PACKAGE
from tfdist.utils.lazy import find_addon

GOLDEN = Path(__file__).with_name("golden")
FILES = sorted(path.name for path in GOLDEN.glob("*.keras"))
if find_addon("recommenders") is None:
    FILES.remove("clicks.keras")

_LOAD = """
import sys
import keras, tfdist
from tfdist.utils.lazy import find_addon
model = keras.models.load_model(sys.argv[1], compile=find_addon("slow_links") is not None)
if sys.argv[2:]:
    import numpy as np
    found = model.predict(np.arange(12).reshape(2, 6) % 11, verbose=0)
    np.testing.assert_allclose(found, np.load(sys.argv[2]), rtol=1e-5, atol=1e-6)
"""
_DESERIALIZE = """
import json, sys
import keras, tfdist
print(type(keras.layers.deserialize(json.load(open(sys.argv[1])))).__name__)
"""


@pytest.mark.parametrize("name", FILES)
def test_a_saved_model_loads(name):
    values = GOLDEN / name.replace(".keras", ".npy")
    python(_LOAD, str(GOLDEN / name), *([str(values)] if values.exists() else []))


def test_a_serialized_layer_is_found():
    found = python(_DESERIALIZE, str(GOLDEN / "attention.json"))
    assert found.split() == ["ParallelMultiHeadAttention"]


def test_the_table_has_each_registered_class():
    marked = re.compile(
        r"@keras\.saving\.register_keras_serializable\(package=\"tfdist\"\)\nclass (\w+)"
    )
    found = {
        name
        for room in rooms()
        for path in python_files(room)
        for name in marked.findall(path.read_text())
    }
    table = {
        name: module
        for name, module in tfdist._REGISTERED.items()
        if not module.startswith("tfdist.addons.") or find_addon(module.split(".")[2]) is not None
    }
    assert found == set(table)
    for name, module in table.items():
        registered = keras.saving.get_registered_name(
            getattr(importlib.import_module(module), name)
        )
        assert registered == f"{PACKAGE}>{name}"
