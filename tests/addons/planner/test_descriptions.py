"""Models, machines and layouts: what they count, and what they refuse."""

from __future__ import annotations

import json
import math

import pytest

from tfdist.addons.planner import (
    DEVICES,
    MLP,
    ConvNet,
    Layout,
    Link,
    Machine,
    Transformer,
    estimate,
    from_config,
    machine,
)
from tfdist.addons.planner.calibration import read_machine, write_machine
from tfdist.addons.planner.configs import KNOWN
from tfdist.addons.planner.parts import count_active_parameters, count_parameters, forward_flops
from tfdist.addons.planner.quantities import as_seconds, read_bytes
from tfdist.utils.quantities import as_bytes

SIZES = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 100, "length": 32}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers"),
        ({"width": -4}, "width"),
        ({"heads": 5}, "divisible by `heads`"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"experts": 2, "top_k": 3}, "top_k"),
        ({"length": math.nan}, "length"),
        ({"gated": "no"}, "gated"),
    ],
)
def test_transformers_that_are_none(changes, said):
    with pytest.raises(ValueError, match=said):
        Transformer(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flops": {}}, "flops"),
        ({"flops": {"float32": 0}}, "flops"),
        ({"memory": -1}, "memory"),
        ({"memory_bandwidth": 0}, "memory_bandwidth"),
        ({"ranks_per_host": 0}, "ranks_per_host"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"overlap": -0.1}, "overlap"),
        ({"inside": 3}, "inside"),
        ({"algorithm": "star"}, "algorithm"),
    ],
)
def test_machines_that_are_none(changes, said):
    figures = {
        "flops": {"float32": 1e12},
        "memory": 1e9,
        "memory_bandwidth": 1e11,
        "inside": Link(1e-6, 1e10),
    }
    with pytest.raises((ValueError, TypeError), match=said):
        Machine(**{**figures, **changes})


def test_links_that_are_none():
    for latency, bandwidth in ((-1, 1), (0, 0), (0, -5), (math.nan, 1), (0, math.inf)):
        with pytest.raises(ValueError, match="Received"):
            Link(latency, bandwidth)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": 0}, "data"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"chunks": 2}, "interleaved"),
        (
            {"pipeline": 4, "schedule": "interleaved", "chunks": 2, "num_microbatches": 6},
            "multiple",
        ),
        ({"num_microbatches": 4}, "accumulation"),
        ({"compression": 0.5}, "compression"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_layouts_that_are_none(changes, said):
    with pytest.raises(ValueError, match=said):
        Layout(**changes)


def test_a_layout_that_does_not_fit_is_refused():
    model = Transformer(**SIZES)
    for layout, batch, said in (
        (Layout(tensor=3), 4, "heads are not divisible by 3"),
        (Layout(pipeline=4, num_microbatches=4), 4, "only 2 blocks"),
        (Layout(data=3), 4, "is not divisible by 3"),
        (Layout(expert=2), 4, "no experts"),
        (Layout(context=32), 4, "chunks"),
    ):
        with pytest.raises(ValueError, match=said):
            estimate(model, machine("a100"), layout, global_batch=batch)
    no_link = machine("a100", between=None, ranks_per_host=2)
    with pytest.raises(ValueError, match="must have a link `between` hosts"):
        estimate(model, no_link, Layout(data=4), global_batch=4)


def test_a_gpu_keeps_memory_for_each_of_its_groups():
    """0.4 GB a group: the two axes, their pairs of neighbors from three stages on, and all ranks."""
    model = Transformer(**{**SIZES, "layers": 4})
    found = {}
    for name, layout in {
        "one": Layout(),
        "data": Layout(data=2),
        "both": Layout(tensor=2, pipeline=2, num_microbatches=2),
        "deep": Layout(tensor=2, pipeline=4, num_microbatches=4),
    }.items():
        found[name] = estimate(model, machine("h100"), layout, global_batch=4).memory.process
    assert found == pytest.approx({"one": 0, "data": 0.4e9, "both": 1.2e9, "deep": 1.6e9})
    assert estimate(model, machine("tpu-v4"), Layout(data=2), global_batch=4).memory.process == 0


def test_flops_of_dense_layers():
    """2 in out forward for a sample."""
    assert forward_flops(MLP([10, 20, 5])) == 2 * (10 * 20 + 20 * 5)
    assert count_parameters(MLP([10, 20, 5])) == 11 * 20 + 21 * 5
    net = ConvNet(8, 3, [4], 10, strides=[2])
    assert forward_flops(net) == 2 * 9 * 3 * 16 * 4 + 2 * 4 * 10


def test_configurations_of_kerashub_and_others():
    llama = {
        "vocabulary_size": 128_256,
        "num_layers": 32,
        "num_query_heads": 32,
        "hidden_dim": 4096,
        "intermediate_dim": 14_336,
        "num_key_value_heads": 8,
    }
    found = from_config({"class_name": "Llama3Backbone", "config": llama}, length=8192)
    assert count_parameters(found) == pytest.approx(8.03e9, rel=0.001)
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50_257,
        "n_positions": 1024,
    }
    assert count_parameters(from_config(gpt2)) == pytest.approx(124.4e6, rel=0.001)
    for broken in ({}, {"num_layers": 3}, {**llama, "num_layers": "many"}):
        with pytest.raises(ValueError, match="Received"):
            from_config(broken, length=8)


def test_devices_by_their_data_sheets():
    # Of hosts as their makers sell them: totals over the devices.
    assert 8 * DEVICES["b200"].memory == 1440e9
    assert 8 * DEVICES["b200"].bandwidth == 64e12
    assert 8 * 2 * DEVICES["b200"].link == 14.4e12
    assert 2 * 6 * DEVICES["tpu-v5p"].link == 1200e9 and 2 * 4 * DEVICES["tpu-v5e"].link == 400e9
    # TensorFlow multiplies float32 in TF32, at half of the rate of float16, on NVIDIA's cards from Ampere on.
    for name in ("a10", "l4", "a100", "h100", "h200", "b200"):
        rates = DEVICES[name].flops
        assert rates["float32"] == pytest.approx(rates["float16"] / 2, rel=0.01)
    assert DEVICES["v100"].flops == {"float32": 15.7e12, "float16": 125e12}
    assert all(device.source for device in DEVICES.values())


def test_a_machine_in_a_file(tmp_path):
    path = tmp_path / "machine.json"
    for name in DEVICES:
        write_machine(path, machine(name, calibrated={"ranks": 8.0}))
        assert read_machine(path) == machine(name, calibrated={"ranks": 8.0})
    good = json.loads(path.read_text())
    for broken in (
        "",
        "[]",
        "{}",
        "[" * 5000,
        json.dumps({**good, "inside": {"latency": 1}}),
        json.dumps({**good, "memory": "much"}),
        json.dumps({**good, "extra": 1}),
        json.dumps({**good, "calibrated": {"ranks": None}}),
    ):
        path.write_text(broken)
        with pytest.raises((ValueError, TypeError), match="Received"):
            read_machine(path)


def test_what_lies_far_beyond_calibration_is_marked():
    model = Transformer(**SIZES)
    near = machine("a100", calibrated={"ranks": 2.0})
    assert not estimate(model, near, Layout(data=8), global_batch=8).extrapolated
    far = estimate(model, near, Layout(data=16), global_batch=16)
    assert far.extrapolated and "extrapolated" in str(far)


def test_6nd_counts_the_active_parameters():
    """Jiang et al. 2024 (arXiv:2401.04088), section 1: 47B parameters, of which a token uses 13B."""
    model = Transformer(**KNOWN["mixtral-8x7b"])
    assert count_parameters(model) == pytest.approx(46.7e9, rel=0.002)
    assert count_active_parameters(model) == pytest.approx(12.9e9, rel=0.002)
    found = estimate(
        model, machine("h100", memory=1e13), Layout(dtype="mixed_bfloat16"), global_batch=2
    )
    assert found.flops_6nd == pytest.approx(6 * 12.9e9 * 2 * 8192, rel=0.002)
    assert found.flops_6nd < found.flops  # Which has the attention core, too.


@pytest.mark.parametrize(
    ("dtype", "optimizer", "size"),
    [
        ("float32", "adam", 8),
        ("mixed_bfloat16", "adam", 8),
        ("bfloat16", "adam", 4),
        ("bfloat16", "momentum", 2),
        ("bfloat16", "sgd", 0),
        ("deepspeed", "adam", 12),
        ("megatron", "adam", 12),
    ],
)
def test_bytes_of_the_optimizer(dtype, optimizer, size):
    """Keras keeps moments in the dtype of the weights; the others in float32, beside a float32 copy."""
    assert Layout(dtype=dtype, optimizer=optimizer).state_bytes == size


def test_units():
    assert read_bytes("80GiB") == 80 * 2**30 and read_bytes("24 GB") == 24 * 10**9
    for wrong in ("", "80", "-1GB", "0GB", "1e9GB", "GiB", "80 gib", "9" * 40 + "GB"):
        with pytest.raises(ValueError, match="Received"):
            read_bytes(wrong)
    assert as_bytes(3 * 2**29) == "1.5 GiB" and as_seconds(90) == "90 s"
    assert as_seconds(math.inf) == "never"
