"""Figures that others have published, from the inputs that they state."""

from __future__ import annotations

import pytest

from tfdist.addons.planner import Layout, Transformer, estimate, machine
from tfdist.addons.planner.layouts import PRECISIONS
from tfdist.addons.planner.memory import kept_bytes, part_bytes, rank_memory
from tfdist.addons.planner.parts import Part, count_parameters, training_flops

GIB = 2**30

#: Narayanan et al. 2021 (arXiv:2104.04473), table 1: parameters in billions, heads, width, layers, tensor,
#: pipeline, GPUs, batch size, and TFLOP/s of a GPU, hardware FLOPs of equation 3.
MEGATRON = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10_240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12_288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16_384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20_480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25_600, 128, 8, 64, 3072, 3072, 163),
]
LENGTH, VOCABULARY = 2048, 51_200
#: What long-tuned programs reach.
AS_TUNED = {"efficiency": 0.7, "memory_efficiency": 0.8}
TUNED = machine("a100", **AS_TUNED)


def megatron(row) -> tuple[Transformer, Layout]:
    _, heads, width, layers, tensor, pipeline, ranks, batch, _ = row
    data = ranks // (tensor * pipeline)
    passes = batch // data
    # The interleaved schedule with as many chunks as divide the layers; the paper does not say how many.
    chunks = next(v for v in (4, 3, 2, 5, 1) if layers % (pipeline * v) == 0)
    interleaved = pipeline > 1 and chunks > 1 and passes % pipeline == 0
    return Transformer(layers, width, heads, VOCABULARY, LENGTH, dropout=True), Layout(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        recompute="every_layer",
        dtype="megatron",
        schedule="interleaved" if interleaved else "1f1b",
        chunks=chunks if interleaved else 1,
        num_microbatches=passes if pipeline > 1 else 1,
        accumulation=1 if pipeline > 1 else passes,
        recompute_messages=True,
        split_messages=True,
    )


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[0]}B")
def test_megatron_lm(row):
    """Parameters, time to 15%, on data-sheet A100s with one efficiency for all rows."""
    billions, _, width, layers, tensor, pipeline, ranks, batch, rate = row
    model, layout = megatron(row)
    # The table has one decimal.
    assert count_parameters(model) / 1e9 == pytest.approx(billions, abs=0.05, rel=0.001)
    # Equation 3: with every block's forward pass done again.
    flops = 96 * batch * LENGTH * layers * width**2
    flops *= 1 + LENGTH / (6 * width) + VOCABULARY / (16 * layers * width)
    found = estimate(model, TUNED, layout, global_batch=batch)
    assert found.step_seconds == pytest.approx(flops / (ranks * rate * 1e12), rel=0.15)
    # Section 5.1: 18 bytes a parameter, and with these layouts all models fit 80 GB.
    states = 18 * count_parameters(model) / (tensor * pipeline)
    planned = found.memory.parameters + found.memory.gradients + found.memory.optimizer
    assert planned == pytest.approx(states, rel=0.15)
    assert found.fits


def test_megatron_lm_trillion_does_not_fit_without_recompute():
    import dataclasses

    for row in MEGATRON[-2:]:
        model, layout = megatron(row)
        kept = dataclasses.replace(layout, recompute="none")
        assert not estimate(model, machine("a100"), kept, global_batch=row[7]).fits


#: Korthikanti et al. 2022 (arXiv:2205.05198), table 5: layers, width, heads, tensor, pipeline, chunks,
#: GPUs and batch, seconds of an iteration with full recompute and with theirs, and MFU of theirs.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 8, 1, 1, 8, 4, 1.42, 1.10, 0.415),
    "175B": (96, 12_288, 96, 8, 8, 3, 64, 64, 18.13, 13.75, 0.514),
    "530B": (105, 20_480, 128, 8, 35, 3, 280, 280, 49.05, 37.83, 0.560),
    "1T": (128, 25_600, 160, 8, 64, 1, 512, 512, 94.42, 71.49, 0.563),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_iterations_of_korthikanti(name):
    """Seconds and MFU to 12%."""
    layers, width, heads, tensor, pipeline, chunks, ranks, batch, full, theirs, mfu = KORTHIKANTI[
        name
    ]
    model = Transformer(layers, width, heads, VOCABULARY, LENGTH, dropout=True)
    for policy, split, seconds in (("every_layer", False, full), ("selective", True, theirs)):
        layout = Layout(
            pipeline=pipeline,
            tensor=tensor,
            recompute=policy,
            sequence_parallel=split,
            dtype="megatron",
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks,
            num_microbatches=batch if pipeline > 1 else 1,
            recompute_messages=True,
            split_messages=True,
        )
        assert ranks == layout.ranks
        found = estimate(model, TUNED, layout, global_batch=batch)
        assert found.step_seconds == pytest.approx(seconds, rel=0.12), policy
    assert found.mfu == pytest.approx(mfu, rel=0.12)


@pytest.mark.parametrize(
    ("heads", "width"), [(64, 6144), (96, 12_288), (128, 20_480), (160, 25_600)]
)
def test_activation_formulas_of_korthikanti(heads, width):
    """Table 2, bytes of a block, to 1%."""
    s, b, t = LENGTH, 4, 8
    block = Transformer(1, width, heads, VOCABULARY, s, dropout=True).parts[1]
    core = 5 * heads * s / width

    def found(recompute="none", gathers_again=True, **changes) -> float:
        layout = Layout(dtype="megatron", gathers_again=gathers_again, **changes)
        return kept_bytes(block, layout, b, recompute)

    unit = s * b * width
    formulas = {
        unit * (34 + core): found(),
        unit * (10 + 24 / t + core / t): found(tensor=t),
        unit / t * (34 + core): found(tensor=t, sequence_parallel=True),
        unit * (10 + 24 / t): found("selective", tensor=t),
        unit * 34 / t: found("selective", tensor=t, sequence_parallel=True),
        unit * 2: found("every_layer", tensor=t),
        # tfdist's own: it keeps what it has gathered.
        unit * (4 + 30 / t + core / t): found(
            tensor=t, sequence_parallel=True, gathers_again=False
        ),
    }
    for theirs, ours in formulas.items():
        assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    ("width", "heads", "saved"), [(12_288, 96, 0.70), (20_480, 128, 0.65)], ids=["GPT-3", "MT-NLG"]
)
def test_what_selective_recompute_saves(width, heads, saved):
    """Korthikanti et al., section 5: 70% and 65% of the activations."""
    block = Transformer(1, width, heads, VOCABULARY, LENGTH, dropout=True).parts[1]
    layout = Layout(tensor=8, sequence_parallel=True, gathers_again=True, dtype="megatron")
    kept = kept_bytes(block, layout, 1, "selective") / kept_bytes(block, layout, 1)
    assert 1 - kept == pytest.approx(saved, abs=0.01)


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
    ids=lambda value: str(value),
)
def test_zero_at_7_5_billion(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 64 ranks, 2 + 2 + 12 bytes a parameter."""
    part = Part("all", whole_parameters=7.5e9)
    layout = Layout(data=64, zero_stage=stage, dtype="deepspeed")
    own = part_bytes(part, layout, 1)
    found = rank_memory([(1,)], 0, [own], layout, machine("a100"))
    states = found.parameters + found.gradients + found.optimizer
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.015)


def test_flops_of_gpt3():
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs for 300 billion tokens, by 6 N D."""
    model = Transformer(96, 12_288, 96, 50_257, 2048)
    assert count_parameters(model) == pytest.approx(175e9, rel=0.01)
    samples = 300e9 / 2048
    assert 6 * count_parameters(model) * 300e9 == pytest.approx(3.14e23, rel=0.01)
    assert samples * training_flops(model) == pytest.approx(3.14e23, rel=0.05)


def test_llama_405b():
    """Llama team 2024, section 3.2: 3.8e25 FLOPs for 15.6T tokens; table 4: MFU of 38% to 43%."""
    from tfdist.addons.planner.configs import KNOWN

    model = Transformer(**KNOWN["llama3-405b"])
    assert count_parameters(model) == pytest.approx(405e9, rel=0.01)
    assert 6 * count_parameters(model) * 15.6e12 == pytest.approx(3.8e25, rel=0.01)
    layout = Layout(
        data=128, pipeline=16, tensor=8, num_microbatches=16, dtype="megatron", zero_stage=1,
        schedule="interleaved", chunks=4,
        sequence_parallel=True, gathers_again=True, recompute="selective",
    )  # fmt: skip
    found = estimate(model, machine("h100", **AS_TUNED), layout, global_batch=2048)
    # They reach 400 TFLOP/s a GPU; a data sheet knows nothing of their stragglers and cooling.
    assert 0.33 <= found.mfu <= 0.50


def test_precisions_are_those_of_their_sources():
    assert PRECISIONS["deepspeed"].parameter + PRECISIONS["deepspeed"].gradient == 4
    # Rajbhandari et al. 2020, section 3.1: 16 bytes with a copy in float32 and two moments.
    deepspeed = PRECISIONS["deepspeed"]
    assert (deepspeed.master, deepspeed.state, deepspeed.compute) == (4, 4, "float16")


@pytest.mark.parametrize(
    ("steps", "seconds"), [("uncompiled", 0.196), ("compiled", 0.0502), ("fused", 0.0292)]
)
def test_gpt2_small_on_an_h100(steps, seconds):
    """Steps of 8 x 1,024 tokens that were measured: docs/performance.md."""
    model = Transformer(12, 768, 12, 50_257, 1024)
    found = estimate(
        model, machine("h100", steps=steps), Layout(dtype="mixed_bfloat16"), global_batch=8
    )
    assert found.step_seconds == pytest.approx(seconds, rel=0.05)
