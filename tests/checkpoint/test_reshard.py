"""What one mesh has saved any other restores, bit for bit, and training goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint import programs
from tests.conftest import on_ranks

MESHES = {
    "data": {"data": 4},
    "tensor": {"data": 1, "tensor": 4},
    "pipeline": {"data": 1, "pipeline": 4},
    "2x2": {"data": 2, "tensor": 2},
    "zero": {"data": 4, "zero_stage": 3},
    "context": {"data": 2, "context": 2, "zero_stage": 1},
}

#: Of a GPT with experts.
MESHES_OF_EXPERTS = {
    "expert": {"data": 1, "expert": 4},
    "data": {"data": 4, "zero_stage": 3},
    "expert-tensor": {"data": 1, "expert": 2, "tensor": 2, "zero_stage": 1},
    "expert-pipeline": {"data": 1, "expert": 2, "pipeline": 2},
    "expert-zero": {"data": 2, "expert": 2, "zero_stage": 3},
}


def check(pool, one_process, folder, sources, targets, experts: bool = False):
    """Saves on each of some meshes, restores on each of others."""
    meshes = MESHES_OF_EXPERTS if experts else MESHES
    paths = {}
    for name in sources:
        where, mesh = (one_process, None) if name == "one" else (pool, meshes[name])
        paths[name] = where.run(
            programs.trained_and_saved, mesh, f"{folder}/{name}", experts, timeout=240
        )[0]
    right = {name: programs.arrays_of(path) for name, path in paths.items()}
    losses = one_process.run(
        programs.restored, None, paths, f"{folder}/on-one", experts, timeout=300
    )[0]
    for target in targets:
        where, mesh = (one_process, None) if target == "one" else (pool, meshes[target])
        for found in where.run(
            programs.restored, mesh, paths, f"{folder}/on-{target}", experts, timeout=400
        ):
            for name, (again, more) in found.items():
                np.testing.assert_allclose(more, losses[name][1], rtol=1e-4)
                arrays = programs.arrays_of(again)
                assert arrays.keys() == right[name].keys()
                for key, value in arrays.items():
                    np.testing.assert_array_equal(
                        counted(key, value), counted(key, right[name][key]), err_msg=key
                    )


def counted(key: str, value: np.ndarray) -> np.ndarray:
    """An array; of those with a row for each rank what all have counted, or what all know."""
    if key.startswith("metrics/"):
        return value.sum(0)
    if key.startswith("local/"):
        np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape), err_msg=key)
        return value[0]
    return value


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_a_pipeline_goes_on_from_shards(pool, one_process, tmp_path):
    check(pool, one_process, tmp_path, ["zero"], ["one", "pipeline"])


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "zero_stage": 3}, {"data": 1, "pipeline": 2}], ids=str
)
def test_without_a_built_optimizer(pool, one_process, tmp_path, mesh):
    """Restoring builds a new optimizer; a model that was not compiled gets the weights."""
    (path,) = one_process.run(programs.trained_and_saved, None, str(tmp_path), timeout=240)
    for optimizer, same in (("new", "built"), ("none", "none")):
        (right,) = one_process.run(programs.resumed, None, path, same, timeout=240)
        for found in pool.run(programs.resumed, mesh, path, optimizer, timeout=240):
            np.testing.assert_allclose(found, right, rtol=1e-4)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_a_context_axis_takes_and_gives(pool, one_process, tmp_path):
    check(pool, one_process, tmp_path, ["context", "2x2"], ["one", "context"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@on_ranks(("horovod", 4), ("tensorflow", 4))
def test_from_any_mesh_to_any_other(pool, one_process, tmp_path):
    every = ["one", *MESHES]
    check(pool, one_process, tmp_path, every, every)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@on_ranks(("horovod", 4))
def test_experts_from_any_mesh_to_any_other(pool, one_process, tmp_path):
    every = ["one", *MESHES_OF_EXPERTS]
    check(pool, one_process, tmp_path, every, every, experts=True)
