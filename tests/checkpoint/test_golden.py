"""Checkpoints that earlier versions wrote are restored, bit for bit, on any mesh."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.golden_v1.models import KINDS, trained, values_of
from tests.conftest import on_ranks

HERE = Path(__file__).parent / "golden_v1"
#: Another mesh than the one that wrote it.
MESHES = {
    "plain": {"zero_stage": 3},
    "named": {"data": 2},
    "counting": {"data": 2},
    "zero": {"data": 1, "pipeline": 2},
    "tensor": {"zero_stage": 3},
    "pipeline": {"data": 1, "tensor": 2},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def golden(kind, tmp_path):
    """The directory with a checkpoint, and what one process had that restored it then."""
    folder = tmp_path / "golden"
    shutil.unpack_archive(HERE / f"{kind}.tar.xz", folder, filter="data")
    with np.load(HERE / f"{kind}.npz") as values:
        return str(folder), dict(values)


def restored(kind: str, folder: str) -> dict[str, np.ndarray]:
    """What a model on one process has that restores a checkpoint."""
    from tfdist import checkpoint

    model = trained(kind, None, seed=9)
    before = values_of(model)
    checkpoint.restore(folder, model)
    found = values_of(model)
    assert any(not np.array_equal(before[name], found[name]) for name in found)
    return found


def restored_and_saved(kind: str, mesh: dict, folder: str, again: str) -> None:
    """Restores a checkpoint on a mesh, and saves it there in the format of now."""
    from tfdist import checkpoint

    model = trained(kind, mesh, seed=9)
    manifest = checkpoint.restore(folder, model)
    assert manifest.files is None
    checkpoint.save(again, model, step=manifest.step)


def check(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_on_one_process(one_process, kind, golden):
    folder, right = golden
    check(one_process.run(restored, kind, folder, timeout=120)[0], right)


@on_ranks(("tensorflow", 2))
def test_on_another_mesh(pool, one_process, kind, golden, tmp_path):
    folder, right = golden
    again = str(tmp_path / "again")
    pool.run(restored_and_saved, kind, MESHES[kind], folder, again, timeout=240)
    check(one_process.run(restored, kind, again, timeout=120)[0], right)
