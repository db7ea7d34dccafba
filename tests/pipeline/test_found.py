"""Models that were made elsewhere and wrapped here: what was wrong with them once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.pipeline import found_programs

KINDS = ["without_a_loss", "positions", "shared_table", "stopped", "constant_states"]


@on_ranks(("horovod", 2))
def test_a_model_from_outside_of_the_scope_is_saved_whole(pool, one_process, tmp_path):
    """Each rank wrote the file, with the weights of its own stage."""
    file = str(tmp_path / "model.weights.h5")
    losses = pool.run(found_programs.made_outside_of_the_scope, file)
    np.testing.assert_allclose(losses, one_process.run(found_programs.loaded, file)[0], rtol=1e-6)


@on_ranks(("horovod", 2))
def test_no_optimizer_of_an_earlier_training_is_saved(pool, tmp_path):
    for is_compiled, right, found in pool.run(
        found_programs.saved_again, str(tmp_path / "m.keras")
    ):
        assert not is_compiled
        np.testing.assert_allclose(found, right, rtol=1e-6)


@on_ranks(("horovod", 2))
def test_what_is_refused_on_all_ranks(pool):
    for said in pool.run(found_programs.with_a_loss_of_its_own):
        assert "a WithLoss with its own `compute_loss`" in said
    for said in pool.run(found_programs.frozen_later):
        assert "requires trainable weights that a loss depends on. Received: none on rank 0" in said
    for said in pool.run(found_programs.nothing_learned):
        assert "none on rank 0 in first" in said
    for said in pool.run(found_programs.shared_state):
        assert "shared/moving_mean" in said
    for said in pool.run(found_programs.in_float8):
        assert "cannot train layers in float8" in said


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("kind", slow_but(["without_a_loss", "shared_table", "stopped"], KINDS))
def test_as_one_process(pool, one_process, kind):
    program = getattr(found_programs, kind)
    if kind == "positions" and pool.engine == "tensorflow":
        with pytest.raises(
            ValueError, match="run_eagerly=True is not supported in a pipeline on T"
        ):
            pool.run(program, True)
        return
    right = one_process.run(program, False)[0]
    for found in pool.run(program, True):
        for value, correct in zip(found, right, strict=True):
            np.testing.assert_allclose(value, correct, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_positions_of_two_stages_and_data_ranks(pool, one_process):
    right = one_process.run(found_programs.shared_positions, False)[0]
    for found in pool.run(found_programs.shared_positions, True):
        for value, correct in zip(found, right, strict=True):
            np.testing.assert_allclose(value, correct, rtol=1e-5, atol=1e-6)


@on_ranks(("horovod", 2))
def test_a_weight_without_a_gradient_beside_a_guard(pool):
    pytest.importorskip("tfdist.addons.monitoring")
    assert np.isfinite(pool.run(found_programs.with_an_unused_weight)).all()


@on_ranks(("horovod", 2))
def test_the_policy_is_that_of_the_model(pool):
    """A task of KerasHub has that of its backbone, whatever the global one is."""
    assert set(pool.run(found_programs.policy_of_the_model)) == {"LossScaleOptimizer"}


def test_recomputed_layers_keep_masks(one_process):
    right, found = (one_process.run(found_programs.masked, each)[0] for each in (False, True))
    np.testing.assert_allclose(found, right, rtol=1e-6)
