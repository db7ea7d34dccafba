"""The programs that the planner prints: they train what was planned, byte for byte."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tfdist.addons.planner import Layout, Transformer, estimate, machine
from tfdist.addons.planner.programs import code, gpt_arguments, layout_flags

PLAIN = Transformer(2, 32, 4, 96, 32, learned_positions=False)
LLAMA = Transformer(
    2, 32, 4, 96, 32, kv_heads=2, hidden=48, gated=True, tied=False, learned_positions=False,
    use_bias=False, norm_bias=False,
)  # fmt: skip
EXPERTS = Transformer(2, 32, 4, 96, 32, experts=4, top_k=1, learned_positions=False)
AXES = {
    "data": (PLAIN, {"data": 2}),
    "zero-1": (LLAMA, {"data": 2, "zero_stage": 1}),
    "zero-2": (PLAIN, {"data": 2, "zero_stage": 2}),
    "zero-3": (LLAMA, {"data": 2, "zero_stage": 3}),
    "tensor": (LLAMA, {"tensor": 2}),
    "sequence": (PLAIN, {"tensor": 2, "sequence_parallel": True}),
    "pipeline": (PLAIN, {"pipeline": 2, "num_microbatches": 2}),
    "context": (LLAMA, {"context": 2}),
    "expert": (EXPERTS, {"expert": 2}),
    "recompute": (PLAIN, {"data": 2, "recompute": "every_layer"}),
}
DTYPES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16"]
#: Enough rows for the copies of weights to be little beside activations.
BATCH = 64
#: Of an optimizer beside its state: the count of steps and the rate; of a loss scale its own two.
COUNTERS = 40


def run(program: str, rows: int, length: int, vocabulary: int) -> dict[str, int]:
    """Runs a program on two batches; the planned bytes of this rank, and of live variables."""
    import keras

    import tfdist
    from tfdist import testing
    from tfdist.addons.monitoring import memory_report

    draw = np.random.default_rng(0)
    x = draw.integers(0, vocabulary, (2 * BATCH, length))
    names = {"x": x, "y": x}
    before = keras.config.dtype_policy()
    # The ranks of the pool have met already.
    with mock.patch.object(tfdist.strategies, "auto", testing.strategy):
        try:
            exec(program, names)
        finally:
            keras.config.set_dtype_policy(before)
    model = names["model"]
    found = memory_report(model, rows=rows, input_shape=(length,))
    state = found.row("optimizer state").measured
    return {
        "parameters": found.row("parameters").measured,
        "gradients": found.row("gradients").planned,
        "optimizer": state,
        "activations": next((r.planned for r in found.rows if r.what == "activations"), None),
    }


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("optimizer", slow_but(["adam"], ["sgd", "momentum", "adam"]))
@pytest.mark.parametrize("dtype", slow_but(["mixed_bfloat16"], DTYPES))
@pytest.mark.parametrize("axis", slow_but(["zero-3", "tensor"], AXES))
def test_a_program_takes_what_was_planned(pool, axis, dtype, optimizer):
    model, options = AXES[axis]
    layout = Layout(dtype=dtype, optimizer=optimizer, **options)
    planned = estimate(model, machine("a100"), layout, global_batch=BATCH).memory
    program = code(model, layout, global_batch=BATCH)
    rows = layout.microbatch_rows(BATCH)
    found = pool.run(run, program, rows, model.length, model.vocabulary, timeout=200)
    # That with most: the first stage of a pipeline; elsewhere all have the same.
    most = found[0]
    assert most["parameters"] == planned.parameters
    assert most["gradients"] == planned.gradients
    assert planned.optimizer <= most["optimizer"] <= planned.optimizer + COUNTERS
    # The report knows no loss, which keeps the logits; of a pipeline no stage; and not how many tokens an
    # expert gets.
    logits = 4 * rows * model.length * model.vocabulary / (layout.tensor * layout.context)
    if layout.pipeline == layout.expert == 1:
        assert most["activations"] == pytest.approx(planned.activations - logits, rel=0.1)


def test_a_program_of_a_model_that_the_planner_cannot_build():
    from tfdist.addons.planner import MLP

    layout = Layout(data=2, accumulation=2, optimizer="momentum", dtype="float16")
    program = code(MLP([4, 8, 2]), layout, global_batch=8)
    compile(program, "program", "exec")
    assert "model = build()" in program
    assert "SGD(momentum=0.9, gradient_accumulation_steps=2)" in program
    assert "LossScaleOptimizer(optimizer)" in program and "batch_size=4" in program


def test_flags_of_a_layout():
    layout = Layout(
        data=2, pipeline=2, tensor=2, zero_stage=1, recompute="selective", num_microbatches=4
    )
    assert " ".join(layout_flags(layout)) == (
        "--data=2 --pipeline=2 --tensor=2 --num_microbatches=4 --schedule=1f1b --zero_stage=1 "
        "--recompute=selective"
    )


def test_no_program_for_the_precision_of_others():
    with pytest.raises(ValueError, match="mixed precision of DeepSpeed"):
        code(PLAIN, Layout(dtype="deepspeed"), global_batch=1)


def test_a_model_is_built_as_it_was_described():
    """Sizes to arguments, and back."""
    import tfdist
    from tfdist.addons.planner import describe

    for model in (PLAIN, LLAMA, EXPERTS, Transformer(2, 32, 4, 96, 32, head_dim=12, tied=False)):
        built = tfdist.models.gpt(model.vocabulary, **gpt_arguments(model))
        again = describe(built, length=model.length)
        assert again.parts == model.parts
