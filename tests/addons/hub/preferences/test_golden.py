"""Losses and log-probabilities of TRL (`benchmarks/peers/trl_preferences.py`), from each layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.addons.hub.preferences import programs
from tests.addons.hub.preferences.test_preferences import LAYOUTS
from tests.conftest import on_ranks, slow_but

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")

GOLDEN = Path(__file__).with_name("golden.npz")
STEPS, RATE = 3, 0.05
#: TRL has no conservative loss.
KINDS = ["dpo", "ipo", "robust", "orpo"]


@pytest.fixture
def folder(tmp_path) -> str:
    from safetensors.numpy import save_file

    found = dict(np.load(GOLDEN))
    (tmp_path / "config.json").write_text(str(found["config"]))
    weights = {
        name.removeprefix("weights/"): value
        for name, value in found.items()
        if name.startswith("weights/")
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return str(tmp_path)


def check(found, kind: str) -> None:
    golden = np.load(GOLDEN)
    losses, means = found
    np.testing.assert_allclose(losses, golden[f"{kind}/losses"], rtol=1e-5, atol=1e-5)
    for place, name in enumerate(("chosen", "rejected")):
        right = golden[f"{kind}/logps/{name}"]
        np.testing.assert_allclose(means[:, place], right, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process(one_process, folder, kind):
    arguments = str(GOLDEN), folder, None, kind, STEPS, RATE
    (found,) = one_process.run(programs.as_trl, *arguments, timeout=200)
    check(found, kind)


@pytest.mark.slow
@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but([], list(LAYOUTS)))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks(pool, folder, kind, layout):
    arguments = str(GOLDEN), folder, LAYOUTS[layout], kind, STEPS, RATE
    for found in pool.run(programs.as_trl, *arguments, timeout=300):
        check(found, kind)
