"""`fit` with compressed gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compression import programs
from tests.conftest import on_ranks, slow_but


def in_one_process(**options):
    from tfdist.strategies import LocalStrategy

    return programs.fitted(LocalStrategy(), 50, 4, **options)


@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("zero_stage", slow_but([0, 2], [0, 1, 2]))
def test_full_rank_is_plain_training(pool, one_process, zero_stage):
    """PowerSGD of a rank that the matrices do not exceed sends all that there is."""
    arguments = {"rank": 64, "min_compression_rate": 0.01, "start_step": 3}
    expected, _ = one_process.run(in_one_process)[0]
    for weights, _ in pool.run(
        programs.train, "PowerSGD", arguments, zero_stage=zero_stage, timeout=120
    ):
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=2e-5, err_msg=name)


OTHERS = {
    "accumulated": {"accumulate": 2},
    "scaled": {"scaled": True},
    "zero": {"zero_stage": 2},
    "tensor": {"mesh": {"data": 2, "tensor": 1}},
}


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("PowerSGD", {"rank": 2}),
        ("TopK", {"ratio": 0.1, "momentum_correction": 0.5}),
        ("OneBit", {"block": 64}),
        ("Int8", {}),
        ("Int4", {}),
    ],
)
def test_learns_alike_on_all_ranks(pool, kind, arguments, other):
    ranks = pool.run(
        programs.train, kind, {**arguments, "start_step": 2}, timeout=120, **OTHERS[other]
    )
    for weights, losses in ranks:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, ranks[0][0][name], err_msg=name)
        assert losses[-1] < losses[0]
        assert np.isfinite(losses).all()
