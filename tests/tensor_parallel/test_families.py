"""KerasHub's families, fine-tuned and made to generate on ranks, as in one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import full_cross, on_ranks, slow_but
from tests.parity.comparing import allowed
from tests.parity.feeding import ORDERS
from tests.tensor_parallel import families

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
ZERO = {"zero_stage": 3}
BOTH = {"mesh": {"data": 2, "tensor": 2}, "zero_stage": 3}
EVERY = [*families.DECODERS, "Bert", "Roberta", "T5", "ViT", "Whisper"]
#: Keras itself cannot quantize the bias layer of Bloom, which has no weights.
QUANTIZED = [name for name in families.DECODERS if name in ("GPT2", "Llama", "Gemma", "Falcon")]


#: Weights may differ by this. What differs by more must be rounding: nothing of it is left in float64,
#: or, where a model has none, another order of the rows changes as much in one process.
WEIGHTS = 1e-5
#: The largest difference of weights in float64.
WEIGHTS_FLOAT64 = 1e-10


def apart(weights: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest difference, and the variable that has it."""
    assert list(weights) == list(right)
    return max((float(np.max(np.abs(weights[path] - right[path]))), path) for path in right)


def losses_apart(losses: list[float], right: list[float]) -> float:
    """The largest difference of the losses of a step."""
    return max(abs(one - other) for one, other in zip(losses, right, strict=True))


@functools.cache
def reference(one_process, name: str, **changes) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and weights of one process."""
    return one_process.run(families.train, name, timeout=240, **changes)[0]


def noise(one_process, name: str, **changes) -> list[float]:
    """The largest difference of a weight that each other order of the rows makes in one process."""
    given, *others = (reference(one_process, name, order=o, **changes)[1] for o in ORDERS)
    return [apart(other, given)[0] for other in others]


def apart_in_float64(pool, one_process, name, options, **changes) -> float:
    """The largest difference of a weight in float64, on any rank."""
    changes["dtype"] = "float64"
    _, right = reference(one_process, name, **changes)
    found = pool.run(families.train, name, options, timeout=240, **changes)
    return max(apart(weights, right)[0] for _, weights in found)


def check(pool, one_process, name, options, **changes):
    right = reference(one_process, name, **changes)
    for losses, weights in pool.run(families.train, name, options, timeout=240, **changes):
        assert losses[0] == pytest.approx(right[0][0], rel=1e-6)
        assert losses == pytest.approx(right[0], rel=1e-4)
        found, path = apart(weights, right[1])
        if found > WEIGHTS and name in families.DECODERS and "quantize" not in changes:
            assert apart_in_float64(pool, one_process, name, options, **changes) <= WEIGHTS_FLOAT64
        else:
            limit = allowed(found, WEIGHTS, lambda: noise(one_process, name, **changes))
            assert found <= limit, path
    assert right[0][-1] != right[0][0]


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", slow_but(["Gemma"], EVERY))
def test_split(pool, one_process, name):
    check(pool, one_process, name, TENSOR)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["Mixtral", "QwenMoe", "Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_experts_are_spread(pool, one_process, name, zero_stage):
    # Plain KerasHub computes all experts for all tokens.
    options = {"mesh": {"data": 1, "expert": 2}, "zero_stage": zero_stage}
    check(pool, one_process, name, options)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_experts_are_spread_and_sharded(pool, one_process):
    check(pool, one_process, "Mixtral", {"mesh": {"data": 2, "expert": 2}, "zero_stage": 3})


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "Llama", "Phi3", "Qwen3"])
@pytest.mark.slow
def test_split_attends_by_blocks(pool, one_process, name):
    (right,) = one_process.run(families.train, name, timeout=240)
    for losses, _ in pool.run(families.train, name, TENSOR, in_blocks=True, timeout=240):
        if losses != pytest.approx(right[0], rel=1e-5):
            # Rounding grows from step to step; in float64 nothing of it is left.
            assert losses == pytest.approx(right[0], rel=1e-4)
            found = apart_in_float64(pool, one_process, name, TENSOR, in_blocks=True)
            assert found <= WEIGHTS_FLOAT64


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("lora", ["before", "after"])
@pytest.mark.parametrize("name", families.DECODERS)
def test_split_with_lora(pool, one_process, name, lora):
    check(pool, one_process, name, TENSOR, lora=lora)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_split_and_quantized_with_lora(pool, one_process, name, quantize):
    check(pool, one_process, name, TENSOR, lora="before", quantize=quantize)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_lora_comes_after_the_split(pool, one_process, quantize):
    check(pool, one_process, "Llama", TENSOR, lora="after", quantize=quantize)


def sharded():
    """All families on one engine with LoRA and on the other without; the full cross has the rest."""
    for engine in ("horovod", "tensorflow"):
        for name in EVERY:
            for lora in (None, "before") if name in families.DECODERS else (None,):
                usual = (engine == "horovod") == (lora == "before" or name not in families.DECODERS)
                marks = pytest.mark.slow if usual else full_cross
                case = f"{engine}-2-{name}-{lora or 'whole'}"
                yield pytest.param((engine, 2), name, lora, marks=marks, id=case)


@pytest.mark.parametrize(("pool", "name", "lora"), list(sharded()), indirect=["pool"])
def test_sharded(pool, one_process, name, lora):
    check(pool, one_process, name, ZERO, lora=lora)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", EVERY)
def test_data_parallel(pool, one_process, name):
    check(pool, one_process, name, {})


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("name", families.DECODERS)
def test_split_over_four(pool, one_process, name):
    check(pool, one_process, name, {"mesh": {"data": 1, "tensor": 4}}, tensor=4)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_split_and_sharded(pool, one_process, quantize):
    check(pool, one_process, "Llama", BOTH, lora="before", quantize=quantize)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("lora", ["before", "after"])
@pytest.mark.parametrize("rank", [1, 100])
@pytest.mark.slow
def test_adapters_of_any_rank(pool, one_process, rank, lora):
    """One, and more than a layer is wide."""
    check(pool, one_process, "Llama", TENSOR, lora=lora, rank=rank)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("lora", [None, "before"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_that_does_not_divide(pool, one_process, rows, lora):
    check(pool, one_process, "Llama", BOTH, lora=lora, rows=rows)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("options", [TENSOR, ZERO], ids=["tensor", "zero"])
@pytest.mark.parametrize("name", ["Llama", "Llama3", "GptOss"])
def test_policies(pool, one_process, name, options, dtype):
    """Half precision rounds more than the order of sums does: losses to a rounding of their own."""
    right, _ = reference(one_process, name, dtype=dtype)
    others = [reference(one_process, name, dtype=dtype, order=o)[0] for o in ORDERS]
    rounding = 2.0**-8 * max(right)
    for losses, _ in pool.run(families.train, name, options, dtype=dtype, timeout=240):
        found = losses_apart(losses, right)
        limit = allowed(found, rounding, lambda: [losses_apart(x, right) for x in others])
        assert found <= limit
    assert right[-1] < right[0]
