"""Tables are saved as global arrays, and restored on any mesh, in any placement, by plain Keras."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.recommenders import embedding_programs as programs
from tests.checkpoint.programs import arrays_of
from tests.checkpoint.test_reshard import counted
from tests.conftest import on_ranks

MIXED = "rows columns table"
#: Meshes and placements that restore.
TARGETS = [
    (None, MIXED),
    ({"data": -1}, "table rows columns"),
    ({"data": -1, "zero_stage": 3}, "columns table rows"),
]


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_from_ranks_to_others(pool, one_process, tmp_path, zero_stage):
    mesh = {"data": -1, "zero_stage": zero_stage}
    path, losses = pool.run(programs.trained_and_saved, mesh, MIXED, str(tmp_path), timeout=400)[0]
    right, file = arrays_of(path), f"{tmp_path}/model.weights.h5"
    assert right["model/tables/users"].shape == (programs.USERS, programs.WIDTH)
    for number, (target, placement) in enumerate(TARGETS):
        where = one_process if target is None else pool
        folder = f"{tmp_path}/again-{number}"
        found = where.run(programs.restored, target, placement, path, file, folder, timeout=400)
        for again, more, weights in found:
            np.testing.assert_allclose(more, losses, rtol=1e-5)
            arrays = arrays_of(again)
            assert arrays.keys() == right.keys()
            for key, value in arrays.items():
                np.testing.assert_array_equal(
                    counted(key, value), counted(key, right[key]), err_msg=key
                )
            for name in ("users", "items", "kinds"):
                np.testing.assert_array_equal(weights[name], right[f"model/tables/{name}"])
    (predictions,) = one_process.run(programs.plain_from_file, f"{tmp_path}/model.keras")
    np.testing.assert_allclose(*predictions, rtol=1e-5, atol=1e-6)
