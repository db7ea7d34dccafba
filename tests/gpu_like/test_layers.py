"""What layers and data do on a GPU gives the numbers of a CPU, without work of the host."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu_like import programs
from tests.gpu_like.stand_in import DEVICE
from tfdist.testing import RankPool


@pytest.fixture(scope="module")
def process():
    with RankPool(1, "local", threads=1) as found:
        yield found


CASES = {
    "whole": ({"data": 2}, {}, True, {}),
    "blocks": ({"data": 2}, {}, False, {}),
    "grouped": ({"data": 2}, {"num_key_value_heads": 2, "positions": "rotary"}, True, {}),
    "grouped-blocks": ({"data": 2}, {"num_key_value_heads": 2, "positions": "rotary"}, False, {}),
    "tensor": ({"tensor": 2}, {"sequence_parallel": True}, True, {}),
    "experts": ({"data": 2}, {"num_experts": 4}, True, {}),
    "expert-axis": ({"expert": 2}, {"num_experts": 4}, True, {}),
    "shards": ({"data": 2}, {}, True, {"zero_stage": 3}),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_numbers_of_a_cpu(process, case):
    axes, model, whole, options = CASES[case]
    (on_gpu,), (on_cpu,) = (
        process.run(programs.of_one_step, axes, has_gpu, model, whole, timeout=100, **options)
        for has_gpu in (True, False)
    )
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-6)
    for mine, theirs in zip(on_gpu[1:], on_cpu[1:], strict=True):
        # One step of AdamW of 1e-3: the sign of an entry whose gradient is rounding may differ.
        assert np.mean(np.abs(mine - theirs) > 1e-5) < 0.01


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_images_of_16_bits_are_normalized_as_they_are(process, policy):
    (found,) = process.run(programs.normalization, policy, timeout=100)
    dtype = policy.removeprefix("mixed_")
    assert ("FusedBatchNormV3", dtype) in found
    assert ("Cast", dtype) not in found


@pytest.mark.timeout(120)
def test_the_chunked_loss_has_no_operation_that_is_refused_in_deterministic_runs(process):
    (on_gpu,) = process.run(programs.gradient_of_chunks, True, timeout=60)
    (on_cpu,) = process.run(programs.gradient_of_chunks, False, timeout=60)
    for mine, theirs in zip(on_gpu[:2], on_cpu[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert "SparseSoftmaxCrossEntropyWithLogits" not in on_gpu[2]
    assert "SparseSoftmaxCrossEntropyWithLogits" in on_cpu[2]


@pytest.mark.timeout(120)
def test_dense_batches_are_copied_ahead_and_ids_are_not(process):
    assert dict(process.run(programs.copied_ahead, timeout=60)[0]) == {
        "images": True,
        "ids": False,
        "mixed": False,
        "ragged": False,
        "text": False,
    }


@pytest.mark.timeout(120)
def test_a_monitor_delays_no_collective_and_packs_its_row_on_the_host(process):
    assert process.run(programs.stamped, timeout=60) == [(False, True)]


@pytest.mark.timeout(120)
def test_averages_beside_a_step_go_over_the_host(process):
    (found,) = process.run(programs.over_the_host, timeout=60)
    assert len(found) == 1 and DEVICE not in found[0] and "CPU:0" in found[0]
