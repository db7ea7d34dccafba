"""`generate` on ranks that hold parts of a model, as users call it: the tokens of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.tensor_parallel import families, generating

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
ZERO = {"zero_stage": 3}
slow = pytest.mark.slow


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, ZERO], ids=["tensor", "zero"])
@pytest.mark.parametrize("name", families.DECODERS)
def test_generate(pool, one_process, name, options):
    (right,) = one_process.run(families.generated, name, timeout=240)
    for found in pool.run(families.generated, name, options, timeout=240):
        assert found.keys() == right.keys()
        for sampler, tokens in found.items():
            np.testing.assert_array_equal(tokens, right[sampler], err_msg=sampler)
    assert len({tokens.tobytes() for tokens in right.values()}) > 1


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, ZERO], ids=["tensor", "zero"])
def test_samplers_without_a_seed_draw_alike(pool, options):
    """Each process starts Keras' unseeded samplers elsewhere."""
    first, second = pool.run(generating.unseeded, options, timeout=240)
    np.testing.assert_array_equal(first["together"], second["together"])
    assert not np.array_equal(first["alone"], second["alone"])


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "options", [TENSOR, pytest.param(ZERO, marks=slow)], ids=["tensor", "zero"]
)
def test_other_prompts_on_a_rank_are_refused(pool, options):
    for message in pool.run(generating.other_prompts, options, timeout=240):
        assert "same prompts" in message and "on ranks [1] than on rank 0" in message, message
        assert "\n" not in message


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, ZERO], ids=["tensor", "zero"])
def test_odd_prompts(pool, one_process, options):
    """Prompts of unlike length, full ones, none, and ends: tokens or the error of one process."""
    (right,) = one_process.run(generating.odd_prompts, timeout=240)
    assert right["empty"] == right["one empty"] == "InvalidArgumentError"
    assert (right["stop at once"] != right["different lengths"]).any()
    for found in pool.run(generating.odd_prompts, options, timeout=240):
        assert found.keys() == right.keys()
        for name, tokens in right.items():
            np.testing.assert_array_equal(found[name], tokens, err_msg=name)
