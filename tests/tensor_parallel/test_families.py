"""KerasHub's families, fine-tuned and made to generate on ranks, as in one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.tensor_parallel import families

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
ZERO = {"zero_stage": 3}
BOTH = {"mesh": {"data": 2, "tensor": 2}, "zero_stage": 3}
EVERY = [*families.DECODERS, "Bert", "Roberta", "T5", "ViT", "Whisper"]
#: Keras itself cannot quantize the bias layer of Bloom, which has no weights.
QUANTIZED = [name for name in families.DECODERS if name in ("GPT2", "Llama", "Gemma", "Falcon")]


def check(pool, one_process, name, options, **changes):
    (right,) = one_process.run(families.train, name, timeout=240, **changes)
    for losses, weights in pool.run(families.train, name, options, timeout=240, **changes):
        assert losses[0] == pytest.approx(right[0][0], rel=1e-6)
        assert losses == pytest.approx(right[0], rel=1e-4)
        assert list(weights) == list(right[1])
        for path, value in weights.items():
            np.testing.assert_allclose(value, right[1][path], atol=1e-5, err_msg=path)
    assert right[0][-1] != right[0][0]


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", slow_but(["Gemma"], EVERY))
def test_split(pool, one_process, name):
    check(pool, one_process, name, TENSOR)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("lora", slow_but(["after"], ["before", "after"]))
@pytest.mark.parametrize("name", slow_but(["GPT2"], families.DECODERS))
def test_split_with_lora(pool, one_process, name, lora):
    check(pool, one_process, name, TENSOR, lora=lora)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("quantize", slow_but(["int4"], ["int8", "int4"]))
@pytest.mark.parametrize("name", slow_but(["Llama"], QUANTIZED))
def test_split_and_quantized_with_lora(pool, one_process, name, quantize):
    check(pool, one_process, name, TENSOR, lora="before", quantize=quantize)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_lora_comes_after_the_split(pool, one_process, quantize):
    check(pool, one_process, "Llama", TENSOR, lora="after", quantize=quantize)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", EVERY)
def test_sharded(pool, one_process, name):
    check(pool, one_process, name, ZERO, lora="before" if name in families.DECODERS else None)


@pytest.mark.slow
@on_ranks(("tensorflow", 2))
@pytest.mark.parametrize("name", EVERY)
def test_sharded_without_lora(pool, one_process, name):
    check(pool, one_process, name, ZERO)


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
@pytest.mark.parametrize("options", [TENSOR, pytest.param(ZERO, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", slow_but(["Llama"], [x for x in families.DECODERS if x not in ("Gemma3", "GptOss")])
)
def test_generate(pool, one_process, name, options):
    (right,) = one_process.run(families.generated, name, timeout=240)
    for found in pool.run(families.generated, name, options, timeout=240):
        for sampler, tokens in found.items():
            np.testing.assert_array_equal(tokens, right[sampler], err_msg=sampler)
    assert len({tokens.tobytes() for tokens in right.values()}) > 1
