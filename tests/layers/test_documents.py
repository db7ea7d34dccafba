"""Rows of several documents train what the same documents train in rows of their own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.layers import document_programs as programs

#: Arguments of `gpt`.
MODELS = {
    "learned": {},
    "rotary": {"positions": "rotary", "num_key_value_heads": 2},
    "swiglu": {"normalization": "rms", "activation": "swiglu", "positions": "rotary"},
}
LAYOUTS: dict[str, tuple[dict, dict]] = {
    "data": ({}, {}),
    "zero": ({"zero_stage": 3}, {}),
    "tensor": ({"tensor": 2}, {}),
    "sequence": ({"tensor": 2}, {"sequence_parallel": True}),
    "ring": ({"context": 2}, {"context_attention": "ring"}),
    "all_gather": ({"context": 2}, {"context_attention": "all_gather"}),
    "ulysses": ({"context": 2}, {"context_attention": "ulysses"}),
    "pipeline": ({"pipeline": 2}, {"pipeline": True}),
}


def check(found, right) -> None:
    """Losses and weights; `fit` counts rows, of which the packed batch has fewer."""
    (losses, weights), (expected, own) = found, right
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    assert losses[-1] < losses[0]
    for one, other in zip(weights, own, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max() + 1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_one_process(one_process, name):
    options = MODELS[name]
    (right,) = one_process.run(programs.train, None, packed=False, **options)
    (found,) = one_process.run(programs.train, None, packed=True, **options)
    check(found, right)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["ring", "tensor"], list(LAYOUTS)))
@pytest.mark.parametrize("name", slow_but(["rotary"], ["learned", "rotary"]))
def test_ranks(pool, one_process, name, layout):
    mesh, options = LAYOUTS[layout]
    (right,) = one_process.run(programs.train, None, packed=False, **MODELS[name])
    for found in pool.run(
        programs.train, mesh, packed=True, **{**MODELS[name], **options}, timeout=200
    ):
        check(found, right)


@pytest.mark.slow
@on_ranks(("horovod", 3))
@pytest.mark.parametrize("layout", ["data", "ring", "all_gather"])
def test_three_ranks(pool, one_process, layout):
    mesh, options = LAYOUTS[layout]
    mesh = dict.fromkeys(mesh, 3)
    (right,) = one_process.run(programs.train, None, packed=False)
    for found in pool.run(programs.train, mesh, packed=True, **options, timeout=200):
        check(found, right)


@pytest.mark.parametrize("name", MODELS)
def test_documents_do_not_see_each_other(one_process, name):
    options = MODELS[name]
    (before,) = one_process.run(programs.logits, None, **options)
    starts = np.cumsum([0, *programs.ROWS[0]])
    for document in range(3):
        (after,) = one_process.run(programs.logits, document, **options)
        same = np.ones(programs.TIME, bool)
        same[starts[document] : starts[document + 1]] = False
        np.testing.assert_array_equal(after[same], before[same])
        assert (after[~same] != before[~same]).any()


@pytest.mark.parametrize(
    ("time", "block"), [(24, 8), (37, (16, 8)), pytest.param(1100, None, marks=pytest.mark.slow)]
)
def test_blocks_hide_what_a_mask_hides(one_process, time, block):
    ((found, right),) = one_process.run(programs.blocks, time, block)
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_attention_that_is_not_causal_refuses_documents():
    import tensorflow as tf

    from tfdist.layers import ParallelMultiHeadAttention

    layer = ParallelMultiHeadAttention(2, 4, name="both_ways")
    with pytest.raises(ValueError, match="causal=False in `both_ways`"):
        layer(tf.zeros([1, 3, 8]), document_starts=tf.zeros([1, 3], tf.int32))
