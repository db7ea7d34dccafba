"""Checkpoints and flags of earlier versions still work."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.house.programs import checkpointed
from tfdist.utils.lazy import find_addon

GOLDEN = Path(__file__).with_name("golden")


def going_on(folder: str) -> tuple[list[float], int]:
    from tfdist.testing import strategy

    return checkpointed.train(strategy(zero_stage=2), folder, 9)


@on_ranks(("horovod", 2))
def test_a_checkpoint_is_restored(pool, tmp_path):
    zipfile.ZipFile(GOLDEN / "checkpoint.zip").extractall(tmp_path)
    expected = json.loads((tmp_path / "losses.json").read_text())
    for losses, first_epoch in pool.run(going_on, str(tmp_path), timeout=120):
        assert first_epoch == 4
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.skipif(find_addon("planner") is None, reason="programs have flags of add-ons")
def test_flags_are_known():
    from tests.values.command_lines import programs

    former = json.loads((GOLDEN / "flags.json").read_text())
    found = {name: set(program.values) for name, program in programs().items()}
    assert {name: set(flags) - found[name] for name, flags in former.items()} == {
        name: set() for name in former
    }
