"""Checkpoints that earlier versions wrote are restored, bit for bit, on any mesh."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.golden.models import trained, values_of
from tests.conftest import on_ranks
from tfdist.utils.lazy import find_addon

HERE = Path(__file__).parent / "golden"
#: Another mesh than the one that wrote it.
MESHES = {
    "plain": {"zero_stage": 3},
    "named": {"data": 2},
    "counting": {"data": 2},
    "zero": {"data": 1, "pipeline": 2},
    "tensor": {"zero_stage": 3},
    "pipeline": {"data": 1, "tensor": 2},
    "averaged": {"zero_stage": 3},
}
KEPT = sorted(
    (path.parent.name, path.name.removesuffix(".tar.xz")) for path in HERE.glob("*/*.tar.xz")
)


def test_archives_are_kept():
    kinds = [set(MESHES) - {"averaged"}, set(MESHES)]
    assert [{kind for version, kind in KEPT if version == name} for name in ("v1", "v2")] == kinds


@pytest.fixture(params=KEPT, ids="-".join)
def golden(request, tmp_path):
    """A kind, the directory of its checkpoint, and what one process had that restored it then."""
    version, kind = request.param
    if version == "v1" and find_addon("compat") is None:
        pytest.skip("Format 1 is read by tfdist.addons.compat.")
    folder = tmp_path / "golden"
    shutil.unpack_archive(HERE / version / f"{kind}.tar.xz", folder, filter="data")
    with np.load(HERE / version / f"{kind}.npz") as values:
        return kind, str(folder), dict(values)


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
    checkpoint.save(again, model, step=manifest.step)


def check(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_on_one_process(one_process, golden):
    kind, folder, right = golden
    check(one_process.run(restored, kind, folder, timeout=120)[0], right)


@pytest.mark.slow
@on_ranks(("tensorflow", 2))
def test_on_another_mesh(pool, one_process, golden, tmp_path):
    kind, folder, right = golden
    again = str(tmp_path / "again")
    pool.run(restored_and_saved, kind, MESHES[kind], folder, again, timeout=240)
    check(one_process.run(restored, kind, again, timeout=120)[0], right)
