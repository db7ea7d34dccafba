"""Quantized bases and adapters on tensor ranks: bytes by a formula, and refusals in one line."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.tensor_parallel import adapting

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
FLOAT = 4


def expected_bytes(mode: str, block: int | None, rank: int, tensor: int) -> float:
    """The bytes of a rank: weights of a quantized Llama with LoRA, and Adam's state of the adapters.

    A kernel has 1 byte an entry in int8 and half a byte in int4. int8 has a float scale for each
    output. int4 has for each output and each block of inputs a float scale and a zero point of one
    byte, and for each input a float that says to which block it belongs.
    """
    sizes = adapting.SIZES
    width, hidden = sizes["hidden_dim"], sizes["intermediate_dim"]
    heads, key_heads = sizes["num_query_heads"], sizes["num_key_value_heads"]
    head = width // heads
    keys = key_heads * head

    def product(inputs: int, outputs: int, by_rows: bool) -> float:
        if mode == "int8":
            scales = FLOAT * outputs
            # By rows each rank has a part of all sums, so it has all of their scales.
            return inputs * outputs / tensor + (scales if by_rows else scales / tensor)
        blocks = inputs // block if block else 1
        scales = (FLOAT + (1 if block else 0)) * blocks * outputs
        places = FLOAT * inputs if block else 0  # Whole on each rank.
        is_whole = by_rows and not block
        return inputs * outputs / 2 / tensor + (scales if is_whole else scales / tensor) + places

    columns = [(width, width), (width, keys), (width, keys), (width, hidden), (width, hidden)]
    products = sum(product(*size, by_rows=False) for size in columns)
    products += sum(product(*size, by_rows=True) for size in [(width, width), (hidden, width)])
    norms = FLOAT * 2 * width
    # A of [width, heads, rank] is split by heads, and B of [rank, head] is whole.
    adapters = FLOAT * sum(width * n * rank / tensor + rank * head for n in (heads, key_heads))
    layers = sizes["num_layers"] * (products + norms + adapters)
    table = FLOAT * math.ceil(sizes["vocabulary_size"] / tensor) * width
    moments = 2 * sizes["num_layers"] * adapters
    return layers + table + FLOAT * width + moments


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(("mode", "block"), [("int8", None), ("int4", 16), ("int4", None)])
def test_bytes_of_a_rank(pool, one_process, mode, block):
    (alone,) = one_process.run(adapting.bytes_held, mode, block, 4, None, timeout=240)
    assert alone == pytest.approx(expected_bytes(mode, block, 4, tensor=1), rel=0.05)
    for held in pool.run(adapting.bytes_held, mode, block, 4, TENSOR, timeout=240):
        assert held == pytest.approx(expected_bytes(mode, block, 4, tensor=2), rel=0.05)
        assert held < 0.65 * alone


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "mixed_bfloat16"]))
@pytest.mark.parametrize("mode", slow_but(["int8"], ["int8", "int4"]))
def test_quantized_layers_of_models_in_16_bits(pool, one_process, mode, dtype):
    (right,) = one_process.run(adapting.logits_in_half, mode, dtype, None)
    for found in pool.run(adapting.logits_in_half, mode, dtype, TENSOR, timeout=240):
        np.testing.assert_allclose(found, right, atol=0.02 * np.max(np.abs(right)))


SOME = ["float8 after", "blocks that do not divide", "heads"]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param(list(adapting.REFUSED), id="all"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pool, names):
    """By the layer's name, and with the way out."""
    for found in pool.run(adapting.refused, names, TENSOR, timeout=400):
        assert list(found) == names
        for name, message in found.items():
            for part in adapting.REFUSED[name][1]:
                assert part in message, f"{name}: {message}"
            assert "\n" not in message, f"{name}: {message}"
