"""What readers found: each was another result than that of one process, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bugs import found_programs
from tests.conftest import on_ranks, slow_but

KINDS = [
    *("nested_predict", "other_logs", "decorated_step", "counts_on_batches"),
    *("head_without_a_loss", "scale_of_empty_ranks", "state_in_float64"),
]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("kind", slow_but(KINDS[:4], KINDS))
def test_as_one_process(pool, one_process, kind):
    program = getattr(found_programs, kind)
    right = one_process.run(program, False)[0]
    for found in pool.run(program, True):
        np.testing.assert_allclose(found, right, rtol=1e-4 if kind == "nested_predict" else 1e-5)
        if kind == "state_in_float64":
            assert found == 1.7e9 + 3


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", ["Traced", "Inside"])
def test_a_step_that_is_a_function_is_refused(pool, kind):
    for said in pool.run(found_programs.traced_step, getattr(found_programs, kind)):
        assert "must not be a tf.function: remove it. Received: " in said


SAVES = [(s, stage) for s in ("none", "checkpoint", "file", "several") for stage in (0, 1, 2)]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize(
    ("save", "stage"), slow_but([("none", 0), ("checkpoint", 1), ("several", 1)], SAVES)
)
def test_gradients_of_a_part_of_an_update_are_kept(pool, one_process, tmp_path, save, stage):
    program = found_programs.accumulated_before
    right = one_process.run(program, False, str(tmp_path / "one"), save)[0]
    folder = str(tmp_path / "ranks")
    for found in pool.run(program, True, folder, save, zero_stage=stage):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("stage", slow_but([0, 1], [0, 1, 3]))
def test_all_optimizers_are_kept(pool, one_process, tmp_path, stage):
    right = one_process.run(found_programs.two_optimizers, False, str(tmp_path / "one"))[0]
    options = {"zero_stage": stage} if stage else {}
    for found in pool.run(found_programs.two_optimizers, True, str(tmp_path / "ranks"), **options):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_model_that_is_never_built_is_restored(pool, tmp_path, kind):
    for is_built, saved, restored in pool.run(found_programs.never_built, str(tmp_path), kind):
        assert not is_built and saved == restored and len(saved) > 2


@on_ranks(("horovod", 2))
def test_a_checkpoint_without_the_other_optimizer_is_restored(pool, tmp_path):
    for names in pool.run(found_programs.new_optimizer, str(tmp_path)):
        assert not any("late" in name for name in names)


@on_ranks(("horovod", 2))
def test_an_optimizer_is_saved_once(pool, tmp_path):
    for names in pool.run(found_programs.scaled_attribute, str(tmp_path)):
        assert len([name for name in names if name.endswith("momentum/dense.0/kernel")]) == 1


@on_ranks(("horovod", 2))
def test_scales_of_float8_are_restored(pool, tmp_path):
    for first, second in pool.run(found_programs.scales_of_adam, str(tmp_path)):
        assert first == second


@on_ranks(("horovod", 2))
def test_scales_of_float8_are_those_of_all_rows(pool, one_process):
    right = one_process.run(found_programs.float8_scales)[0]
    found = pool.run(found_programs.float8_scales)
    for losses, scales in found:
        # A gradient of half the rows is twice as large, which rounds otherwise before scales are known.
        np.testing.assert_allclose(losses, right[0], rtol=0.1)
        assert scales == found[0][1]
        assert scales[0] == right[1][0], "the scale of the model's inputs"
    with pytest.raises(ValueError, match="Use `zero_stage=2`"):
        pool.run(found_programs.float8_scales, zero_stage=3)


@on_ranks(("horovod", 2))
def test_variables_that_are_created_later_are_saved(pool, tmp_path):
    for names in pool.run(found_programs.created_later, str(tmp_path)):
        assert "optimizer/late/momentum/dense.0/kernel" in names


@on_ranks(("horovod", 2))
def test_calls_of_fit_are_counted_for_all_meshes(pool):
    """A message of a failed step was taken for one of another mesh's step with the same number."""
    for numbers in pool.run(found_programs.runs_of_two_meshes):
        runs = [number for number in numbers if number > 0]
        assert runs == list(range(runs[0], runs[0] + 3)) and numbers.count(-1) == 2
