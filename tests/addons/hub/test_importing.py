"""Folders of transformers: the logits of transformers, from each layout; and folders that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.addons.hub import importing
from tests.addons.hub.exports import FAMILIES, LAYOUTS, golden, write_checkpoint
from tests.conftest import on_ranks, slow_but

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("name", slow_but(["Llama3", "Mistral"], FAMILIES))
def test_one_process(one_process, tmp_path, name):
    folder = write_checkpoint(name, tmp_path / "checkpoint")
    for options in (None, {}):
        ((found, _),) = one_process.run(importing.imported, name, folder, options, timeout=120)
        np.testing.assert_allclose(found, golden(name)["logits/plain"], atol=1e-5)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", ["tensor", "zero", "pipeline"])
@pytest.mark.parametrize("name", slow_but(["Llama3"], FAMILIES))
def test_ranks(pool, one_process, tmp_path, name, layout):
    folder = write_checkpoint(name, tmp_path / "checkpoint")
    ((_, whole),) = one_process.run(importing.imported, name, folder, None, timeout=120)
    for found, held in pool.run(importing.imported, name, folder, LAYOUTS[layout], timeout=120):
        np.testing.assert_allclose(found, golden(name)["logits/plain"], atol=1e-5)
        assert held < (0.7 if layout != "pipeline" else 0.95) * whole


def test_folders_that_cannot_be_loaded(one_process, tmp_path):
    folder = tmp_path / "checkpoint"
    write_checkpoint("Llama3", folder)

    def said() -> str:
        return one_process.run(importing.said_of, str(folder), None, timeout=60)[0]

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    assert "must be a complete file of safetensors" in said()
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "phi3"}))
    assert "no converter" in said() and "phi3" in said()
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    assert "cannot be loaded" in said() or "must have the shape" in said()
    (folder / "config.json").write_text("{")
    assert "must be a folder with config.json" in said()
