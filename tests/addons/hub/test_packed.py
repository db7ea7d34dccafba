"""Several conversations in a row train what each trains in a row of its own, and none sees another."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.hub import packed
from tests.conftest import on_ranks, slow_but

pytest.importorskip("keras_hub")

QUICK = ["GPT2", "Llama3"]
LAYOUTS = {
    "data": {},
    "tensor": {"mesh": {"tensor": 2}},
    "zero": {"zero_stage": 3},
    "pipeline": {"mesh": {"pipeline": 2}},
}


@pytest.mark.parametrize("in_blocks", slow_but([False], [False, True]))
@pytest.mark.parametrize("name", slow_but(QUICK, packed.FAMILIES))
def test_losses_and_gradients(one_process, name, in_blocks):
    ((right, expected),) = one_process.run(packed.gradients, name, False, timeout=240)
    ((loss, found),) = one_process.run(packed.gradients, name, True, in_blocks, timeout=240)
    assert loss == pytest.approx(right, rel=1e-6)
    # That of a bias of keys is nothing but rounding.
    least = 1e-2 * max(np.abs(value).max() for value in expected.values())
    for path, value in expected.items():
        tolerance = 1e-5 * max(np.abs(value).max(), least)
        np.testing.assert_allclose(found[path], value, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("name", slow_but(QUICK, packed.FAMILIES))
def test_no_conversation_sees_another(one_process, name):
    ((before, others),) = one_process.run(packed.logits, name, False, timeout=240)
    ((after, _),) = one_process.run(packed.logits, name, True, timeout=240)
    assert others.any()
    np.testing.assert_array_equal(after[others], before[others])
    assert (after[~others] != before[~others]).any()


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["pipeline"], list(LAYOUTS)))
@pytest.mark.parametrize(
    ("name", "lora"), slow_but([("Llama3", True)], [(n, n == "Llama3") for n in packed.FAMILIES])
)
def test_ranks(pool, one_process, name, lora, layout):
    ((losses, weights),) = one_process.run(packed.train, name, None, False, lora=lora, timeout=240)
    options = LAYOUTS[layout]
    for found, own in pool.run(packed.train, name, options, True, lora=lora, timeout=300):
        np.testing.assert_allclose(found, losses, rtol=2e-6)
        for path, value in weights.items():
            least = 1e-5 * max(np.abs(value).max(), 1e-2)
            np.testing.assert_allclose(own[path], value, atol=least, err_msg=path)


@pytest.mark.slow
@on_ranks(("horovod", 3))
def test_three_ranks_with_unequal_answers(pool, one_process):
    ((losses, _),) = one_process.run(packed.train, "Qwen", None, False)
    for found, _ in pool.run(packed.train, "Qwen", {}, True, timeout=300):
        np.testing.assert_allclose(found, losses, rtol=2e-6)
