"""Optimizers on slices and shards against Keras' in one process, and against whole parameters."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.optimizers import programs
from tests.conftest import on_ranks, slow_but

KINDS = ["Muon", "Lamb", "Adafactor", "ScheduleFreeAdamW"]
SHARDED = ["Muon", "Lamb", "ScheduleFreeAdamW"]
SLOW = [("horovod", 3), ("tensorflow", 2), ("tensorflow", 3)]


@functools.cache
def expected(one_process, kind: str, *options):
    return one_process.run(functools.partial(programs.alone, kind, **dict(options)))[0]


def check(results, right, accuracy: float = 1e-4) -> None:
    for weights in results:
        for value, correct in zip(weights, right, strict=True):
            np.testing.assert_allclose(value, correct, rtol=accuracy, atol=accuracy)


@on_ranks(("horovod", 2), slow=SLOW)
@pytest.mark.parametrize("kind", slow_but(["Muon", "Adafactor"], KINDS))
def test_slices_as_one_process(pool, one_process, kind):
    mesh = {"data": 1, "tensor": pool.num_ranks}
    check(pool.run(programs.on_rank, kind, mesh, 0, {}), expected(one_process, kind))


@on_ranks(("horovod", 3), slow=[("horovod", 2), *SLOW[1:]])
@pytest.mark.parametrize(
    ("stage", "kind"),
    slow_but([(1, "Muon"), (3, "Lamb")], list(itertools.product([1, 2, 3], SHARDED))),
)
def test_shards_as_one_process(pool, one_process, kind, stage):
    results = pool.run(programs.on_rank, kind, {}, stage, {})
    check(results, expected(one_process, kind))
    whole = pool.run(programs.on_rank, kind, {}, 0, {})
    check(results, whole[0], 1e-6)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("stage", [1, 2])
def test_whole_matrices_bit_by_bit(pool, stage):
    """The sum of two ranks' gradients is the same in any order."""
    options = {"exclude_embeddings": False, "matrices": programs.ATTENTION}
    (one, _), (other, _) = (pool.run(programs.on_rank, "Muon", {}, n, options) for n in (0, stage))
    for value, right in zip(one, other, strict=True):
        if value.ndim > 1:
            np.testing.assert_array_equal(value, right)


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_of_slices(pool, one_process, kind, stage):
    results = pool.run(programs.on_rank, kind, {"data": 2, "tensor": 2}, stage, {})
    check(results, expected(one_process, kind))


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("mesh", slow_but([{}], [{"data": 1, "tensor": 2}, {}]))
def test_kernels_of_attention_as_matrices(pool, one_process, mesh):
    """As Keras updates a layer whose kernels are matrices."""
    right = one_process.run(programs.flat_attention)[0]
    stage = 0 if mesh else 1
    results = pool.run(programs.on_rank, "Muon", mesh, stage, {"matrices": programs.ATTENTION})
    flat = [
        [value.reshape(correct.shape) for value, correct in zip(weights, right, strict=True)]
        for weights in results
    ]
    check(flat, right)


@on_ranks(("horovod", 2), slow=SLOW)
def test_each_rank_orthogonalizes_its_share(pool):
    """A Llama's matrices: the multiplications of the busiest rank, of all of one process."""
    counts = pool.run(programs.orthogonalized, 1)
    assert sum(counts) == pool.run(programs.orthogonalized, 0)[0]
    assert max(counts) <= (0.55 if pool.num_ranks == 2 else 0.4) * sum(counts)


WAYS = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"global_clipnorm": 0.5},
    "averaged": {"use_ema": True, "ema_overwrite_frequency": 4, "ema_momentum": 0.8},
}


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_options_of_keras(pool, one_process, kind, way):
    options = WAYS[way]
    right = expected(one_process, kind, *options.items())
    check(pool.run(programs.on_rank, kind, {"data": 1, "tensor": 2}, 0, options), right)
    if kind in SHARDED and way != "clipped":  # Shards of sparse gradients have other norms.
        check(pool.run(programs.on_rank, kind, {}, 2, options), right)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("way", ["loss scale", "eager", "compiled", "several"])
def test_other_steps(pool, one_process, way):
    right = one_process.run(programs.other_steps, way, {}, 0)[0]
    check(pool.run(programs.other_steps, way, {"data": 1, "tensor": 2}, 0), right)
    check(pool.run(programs.other_steps, way, {}, 1), right)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_another_layout(pool, one_process, tmp_path, kind):
    """One process saves after an epoch, tensor parallel ranks go on, then shards, then one process."""
    meshes = [({}, 0), ({"data": 1, "tensor": 2}, 0), ({}, 1 if kind in SHARDED else 0)]
    for epoch, (mesh, stage) in enumerate(meshes):
        pool.run(programs.one_more_epoch, kind, mesh, stage, str(tmp_path / "saved"), epoch + 1)
    (found, _) = pool.run(programs.one_more_epoch, kind, {}, 0, str(tmp_path / "saved"), 4)
    check([found], one_process.run(programs.one_more_epoch, kind, {}, 0, str(tmp_path / "x"), 4)[0])


@on_ranks(("horovod", 2))
def test_what_is_refused(pool):
    said = pool.run(programs.refusal)[0]
    assert "Adafactor" in said and "Use zero_stage=0" in said


@on_ranks(("horovod", 2))
def test_what_was_refused_is_refused_again(pool):
    first, second = pool.run(programs.refused_twice)[0]
    assert first == second and "Use zero_stage=0" in first


def test_muon_in_16_bits(one_process):
    """The multiplications of Keras are in float32."""
    for found, right in one_process.run(programs.in_16_bits)[0]:
        np.testing.assert_allclose(found, right, rtol=0.01, atol=1e-3)


@on_ranks(("horovod", 2))
def test_lamb_with_parameters_of_several_dtypes(pool, one_process):
    right = one_process.run(programs.several_dtypes, "LocalStrategy", 0)[0]
    check(pool.run(programs.several_dtypes, "auto", 1), right, 0.02)


@on_ranks(("horovod", 3), slow=[("tensorflow", 3)])
def test_adafactor_with_a_rank_that_has_no_row(pool, one_process):
    """Three ranks split a vocabulary of two."""
    right = one_process.run(programs.small_vocabulary, {})[0]
    check(pool.run(programs.small_vocabulary, {"data": 1, "tensor": 3}), right)


@on_ranks(("horovod", 2))
def test_checkpoints_of_adafactor_in_a_pipeline_are_refused(pool, tmp_path):
    said = pool.run(programs.saved_in_a_pipeline, str(tmp_path))
    assert all("unlike Adafactor. Received: 'optimizer/kernel" in each for each in said)


def test_variables_of_tensorflow():
    from tfdist.addons.optimizers import Muon

    found = []
    for kind in (Muon, keras.optimizers.Muon):
        variable = tf.Variable(tf.ones([8]), name="bias")
        optimizer = kind(0.02)
        optimizer.apply([tf.range(8.0)], [variable])
        found.append(variable.numpy())
    np.testing.assert_array_equal(*found)


def test_hostile_arguments():
    from tfdist.addons.optimizers import Muon

    for rows in (0, -1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="matrices"):
            Muon(matrices={".*": rows})
    with pytest.raises(ValueError, match="`matrices` must be a dict whose keys are regular"):
        Muon(matrices={"(": 1})
    again = Muon.from_config(Muon(matrices={".*": 2}).get_config())
    assert again.matrices == {".*": 2}
    optimizer = Muon(matrices={".*kernel": 3})
    layer = keras.layers.EinsumDense("bsd,dhk->bshk", (None, 2, 3))
    layer.build((None, 4, 5))
    with pytest.raises(ValueError, match="must leave dims for the columns"):
        optimizer.build(layer.trainable_variables)
    assert not optimizer.built
