"""Layers of experts on any mesh train as a dense loop over experts in one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.experts import expert_programs
from tests.strategies.programs import in_one_process
from tests.strategies.test_axes import on_mesh
from tfdist import Mesh

MESHES_OF_TWO = {
    "expert": Mesh(data=1, expert=2),
    "data": Mesh(data=2),
    "tensor": Mesh(data=1, tensor=2),
}
MESHES_OF_FOUR = {
    "expert": Mesh(data=1, expert=4),
    "data-expert": Mesh(data=2, expert=2),
    "expert-tensor": Mesh(data=1, expert=2, tensor=2),
}
PIPELINE = {"micro_batches": 2, "balance_over": "sequence"}
#: Of all tokens alike, which go to the same experts: some have none, on some ranks or on all.
ONE_WAY = {"same": True, "balance_loss": 0.0, "top_k": 1, "score_first": False}
VARIANTS = {
    "sequence": {"balance_over": "sequence", "balance_loss": 0.1},
    "sigmoid": {"scores": "sigmoid", "gate_scale": 2.0, "bias_rate": 0.02},
    "accumulated": {"accumulate": 2, "bias_update_steps": 2, "bias_rate": 0.02, "rows": 20},
    "after": {"score_first": False, "shared_hidden_dim": 6, "shared_gate": True},
    "recomputed": {"recomputed": True, "bias_rate": 0.02},
    "one-way": ONE_WAY,
    "all": {"top_k": 4, "activation": "gelu", "use_bias": True},
}


def meshes(which: dict, quick: list[str]) -> list:
    return [
        pytest.param(mesh, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, mesh in which.items()
    ]


@functools.cache
def reference(one_process, options: tuple):
    found = one_process.run(in_one_process, expert_programs.program(**dict(options)), timeout=600)
    return found[0]


def check(pool, one_process, mesh: Mesh, *, ours: dict | None = None, zero_stage=0, **options):
    """Compares the logs and all weights with those of one process; `ours` is for the ranks alone."""
    history, weights = reference(one_process, tuple(sorted(options.items())))
    program = expert_programs.program(**options, **(ours or {}))
    for found, own in pool.run(on_mesh, program, mesh, {"zero_stage": zero_stage}, timeout=600):
        for name, values in history.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
        for place, (one, other) in enumerate(zip(own, weights, strict=True)):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=str(place))


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("mesh", meshes(MESHES_OF_TWO, ["expert"]))
@pytest.mark.parametrize("zero_stage", slow_but([0], [0, 1, 3]))
def test_as_a_dense_loop(pool, one_process, mesh, zero_stage):
    # Of 11 rows in batches of 5 the last has one row: a rank has none.
    check(pool, one_process, mesh, zero_stage=zero_stage, bias_rate=0.01)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants(pool, one_process, variant):
    options = dict(VARIANTS[variant])
    ours = {"recomputed": options.pop("recomputed", False)}
    check(pool, one_process, Mesh(data=1, expert=2), ours=ours, **options)


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("mesh", list(MESHES_OF_FOUR.values()), ids=list(MESHES_OF_FOUR))
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_on_two_axes(pool, one_process, mesh, zero_stage):
    check(pool, one_process, mesh, zero_stage=zero_stage, use_bias=True, bias_rate=0.01)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_in_a_pipeline(pool, one_process, zero_stage):
    mesh = Mesh(data=1, expert=2, pipeline=2)
    options = {"rows": 16, "batch": 8, "epochs": 10, "bias_rate": 0.02}
    sequence = {"balance_over": "sequence"}
    ours = {"micro_batches": 2}
    check(pool, one_process, mesh, ours=ours, zero_stage=zero_stage, **options, **sequence)


def refusals(mesh: Mesh) -> list[str]:
    """What is said where experts do not fit a mesh, its pipeline or the optimizer."""
    from tfdist.experts import MixtureOfExperts
    from tfdist.testing import strategy

    found = []
    with strategy(mesh).scope():
        for sizes in ((3, 8), (4, 7)):
            try:
                MixtureOfExperts(*sizes, name="experts")
            except ValueError as error:
                found.append(str(error))
    for options in (
        {"micro_batches": 2, "rows": 4, "batch": 4},
        {"bias_rate": 0.1, "bias_update_steps": 3, "balance_loss": 0.0},
    ):
        try:
            expert_programs.train(strategy(mesh), **options)
        except ValueError as error:
            found.append(str(error))
    return found


@on_ranks(("horovod", 2))
def test_what_does_not_fit_is_refused_by_name(pool):
    for found in pool.run(refusals, Mesh(data=1, expert=2), timeout=300):
        assert "`experts` with expert=2" in found[0] and "num_experts=3" in found[0]
        assert '`experts` has balance_over="batch"' in found[1]
        assert "bias_update_steps=3 in `experts`" in found[2]


def kept_alike(mesh: Mesh):
    """The bias of each layer as this rank has it, which an evaluation does not move."""
    from tfdist.testing import strategy

    _, (before, after) = expert_programs.train(
        strategy(mesh), bias_rate=0.02, rows=7, batch=5, epochs=2, biases_only=True
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    return after


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_the_bias_is_the_same_on_all_ranks(pool):
    first, *others = pool.run(kept_alike, Mesh(data=1, expert=2), timeout=300)
    assert any(np.any(bias) for bias in first)
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_permutation_there_and_back():
    import tensorflow as tf

    from tfdist.experts.permutation import combine, gather_rows, sort_by_expert

    chance = np.random.default_rng(0)
    tokens = tf.constant(chance.normal(size=(12, 4)).astype("float32"))
    experts = tf.constant(chance.integers(0, 3, (12, 2)), tf.int32)
    gates = tf.fill([12, 2], 0.5)
    for options in ({}, {"is_there": tf.constant(True)}, {"capacity": tf.constant(99)}):
        permutation = sort_by_expert(experts, 5, gates=gates, **options)
        with tf.GradientTape() as tape:
            tape.watch(tokens)
            back = combine(gather_rows(tokens, permutation), gates, permutation)
            loss = tf.reduce_sum(back * back)
        np.testing.assert_allclose(back, tokens, rtol=1e-6)
        np.testing.assert_allclose(tape.gradient(loss, tokens), 2 * tokens, rtol=1e-6)
    # Each of 5 experts takes 2 rows at most, those with the largest gates.
    gates = tf.constant(chance.random((12, 2)).astype("float32"))
    permutation = sort_by_expert(experts, 5, capacity=tf.constant(2), gates=gates)
    for expert in range(5):
        chosen = experts.numpy() == expert
        kept = permutation.kept.numpy() & chosen
        assert kept.sum() == min(2, chosen.sum()) == permutation.counts[expert]
        if 0 < kept.sum() < chosen.sum():
            assert gates.numpy()[kept].min() >= gates.numpy()[chosen & ~kept].max()
    # A rank without rows.
    permutation = sort_by_expert(experts, 5, is_there=tf.constant(False))
    rows = gather_rows(tokens, permutation)
    assert rows.shape == (0, 4)
    np.testing.assert_array_equal(combine(rows, gates, permutation), np.zeros((12, 4)))


def test_the_bias_by_hand():
    """Wang et al. 2024, algorithm 1: a rate's step towards the experts that were chosen seldom."""
    import keras

    from tfdist.experts.balancing import BiasState

    def bias_after(state, *counts):
        state.update(np.array(counts, "float32"))
        return np.asarray(state.bias.value)

    each = BiasState(keras.layers.Layer(), 4, rate=0.1, steps=1)
    np.testing.assert_allclose(bias_after(each, 6, 2, 2, 2), [-0.1, 0.1, 0.1, 0.1])
    np.testing.assert_allclose(bias_after(each, 3, 3, 3, 3), [-0.1, 0.1, 0.1, 0.1])
    # Of two batches together: 6, 6, 4 and 4.
    second = BiasState(keras.layers.Layer(), 4, rate=0.1, steps=2)
    np.testing.assert_array_equal(bias_after(second, 6, 2, 2, 2), np.zeros(4))
    np.testing.assert_allclose(bias_after(second, 0, 4, 2, 2), [-0.1, -0.1, 0.1, 0.1])
    # What was counted before is over.
    np.testing.assert_allclose(bias_after(second, 1, 1, 1, 1), [-0.1, -0.1, 0.1, 0.1])
    np.testing.assert_allclose(bias_after(second, 0, 0, 0, 4), [0.0, 0.0, 0.2, 0.0], atol=1e-7)
