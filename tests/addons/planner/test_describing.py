"""Built models, as the planner sees them."""

from __future__ import annotations

import keras
import pytest

import tfdist
from tfdist.addons.planner import Layout, Transformer, describe, estimate, machine
from tfdist.addons.planner.parts import count_active_parameters, count_parameters, forward_flops


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "positions": "rotary",
            "tied_head": False,
            "activation": "swiglu",
            "use_bias": False,
            "normalization": "rms",
            "head_dim": 12,
        },
        {"num_key_value_heads": 2, "hidden_dim": 40},
        {"num_experts": 4, "top_k": 1},
    ],
    ids=["plain", "llama", "grouped", "experts"],
)
def test_a_gpt(options):
    model = tfdist.models.gpt(50, num_layers=3, width=32, num_heads=4, max_length=16, **options)
    found = describe(model, length=16)
    assert isinstance(found, Transformer) and found.layers == 3
    assert count_parameters(found) == model.count_params()
    # One of 4 experts is used.
    unused = 3 / 4 * sum(w.shape.num_elements() for w in expert_weights(model))
    assert count_active_parameters(found) == model.count_params() - unused


def expert_weights(model) -> list:
    """The weights of experts, whose first dim is that of the experts."""
    mixtures = [block.mlp for block in model.layers if hasattr(block, "mlp")]
    return [
        each.value
        for mixture in mixtures
        if isinstance(mixture, tfdist.experts.MixtureOfExperts)
        for each in mixture.trainable_variables
        if each.name != "router_kernel"
    ]


def test_a_mixture_in_a_chain():
    """What of it is active, where nobody knows the model."""
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8),
            tfdist.experts.MixtureOfExperts(num_experts=4, hidden_dim=16, top_k=1, use_bias=False),
            keras.layers.Dense(2),
        ]
    )
    found = describe(model)
    unused = 3 * (3 * 8 * 16)  # Of each of three experts, three matrices.
    assert count_parameters(found) - count_active_parameters(found) == unused
    step = estimate(found, machine("a100"), Layout(), global_batch=4)
    assert step.flops_6nd == 6 * 4 * (model.count_params() - unused)


def test_a_chain():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    found = describe(model)
    assert count_parameters(found) == model.count_params()
    assert forward_flops(found) == pytest.approx(2 * 64 * 27 * 4 + 2 * 256 * 10, rel=0.02)
    step = estimate(found, machine("a100"), Layout(data=2, zero_stage=1), global_batch=8)
    assert step.fits and step.memory.activations > 0
    with pytest.raises(ValueError, match="tensor"):
        estimate(found, machine("a100"), Layout(tensor=2), global_batch=8)


def test_what_cannot_be_described():
    rotary = tfdist.models.gpt(
        8, num_layers=1, width=8, num_heads=2, max_length=4, positions="rotary"
    )
    with pytest.raises(ValueError, match="length=None"):
        describe(rotary)
    with pytest.raises(TypeError, match="`model`"):
        describe("gpt")
