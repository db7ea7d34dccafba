"""Pipelines against one process: each schedule, mesh and engine."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.pipeline import programs

#: Many ranks on few cores trace a step for minutes.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@functools.cache
def expected(pool, kind="gpt", **options):
    return pool.run(programs.train, None, kind, **options, timeout=300)[0]


def compare(one, many, *, weights=1e-5):
    """Losses of all steps, what `evaluate` and `predict` return, and the gathered weights."""
    for name, right in one.history.items():
        for rank in many:
            np.testing.assert_allclose(rank.history[name], right, rtol=1e-4, err_msg=name)
    for rank in many:
        np.testing.assert_allclose(rank.history["loss"][0], one.history["loss"][0], rtol=1e-6)
        np.testing.assert_allclose(rank.evaluation, one.evaluation, rtol=1e-5)
        np.testing.assert_allclose(rank.predictions, one.predictions, atol=1e-4, rtol=1e-3)
        assert rank.own_variables < len(one.weights)
        for found, right in zip(rank.weights, one.weights, strict=True):
            np.testing.assert_allclose(found, right, atol=weights)


def check(pool, one_process, mesh, kind="gpt", *, pipeline, **options):
    one = expected(one_process, kind, **options)
    many = pool.run(programs.train, mesh, kind, pipeline=pipeline, **options, timeout=480)
    compare(one, many)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages(pool, one_process, schedule):
    check(pool, one_process, {"pipeline": 2}, pipeline={"schedule": schedule})


@on_ranks(("tensorflow", 2))
@pytest.mark.parametrize("schedule", slow_but(["interleaved"], SCHEDULES))
def test_two_stages_over_tensorflow(pool, one_process, schedule):
    check(pool, one_process, {"pipeline": 2}, pipeline={"schedule": schedule})


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("convnet", {"weighted": True}),
        pytest.param("gpt", {"optimizer": "clipnorm"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_stages_with(pool, one_process, kind, options):
    check(pool, one_process, {"pipeline": 2}, kind, pipeline={}, **options)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b"])
def test_regularizers_shortcuts_and_frozen_weights(pool, one_process, schedule):
    check(pool, one_process, {"pipeline": 2}, "convnet", pipeline={"schedule": schedule})


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_a_link_on_each_stage(pool, one_process):
    pipeline = {"schedule": "interleaved", "cut": "cyclic", "num_microbatches": 4}
    # Embedding, positions, dropout, four blocks, norm, head: one more makes ten.
    options = {"num_layers": 5}
    check(pool, one_process, {"pipeline": 2}, pipeline=pipeline, **options)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_stages_of_split_layers(pool, one_process):
    pipeline = {"schedule": "zero-bubble"}
    check(pool, one_process, {"pipeline": 2, "tensor": 2}, pipeline=pipeline, split_loss=True)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_another_order_of_the_axes(pool, one_process):
    mesh = {"pipeline": 2, "data": 2, "order": ("data", "tensor", "pipeline")}
    check(pool, one_process, mesh, pipeline={})


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "mesh", [{"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "data": 2}], ids=str
)
def test_four_ranks_with_every_schedule(pool, one_process, mesh, schedule):
    check(pool, one_process, mesh, pipeline={"schedule": schedule})


@pytest.mark.slow
@on_ranks(("horovod", 8), ("tensorflow", 8))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_by_two_by_two(pool, one_process, schedule):
    mesh = {"pipeline": 2, "tensor": 2, "data": 2}
    pipeline = {"schedule": schedule, "num_microbatches": 2}
    check(pool, one_process, mesh, pipeline=pipeline, split_loss=True)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_checkpoints_are_those_of_the_whole_chain(pool, one_process, tmp_path):
    folder = str(tmp_path)
    first, second = pool.run(programs.save, {"pipeline": 2}, folder, timeout=200)
    alone = one_process.run(programs.load, None, folder)
    for others in (second, *alone, *pool.run(programs.load, {"pipeline": 2}, folder)):
        for found, right in zip(others, first, strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_several_steps_an_execution(pool, one_process):
    check(pool, one_process, {"pipeline": 2}, pipeline={}, per_execution=4)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_ranks_agree_on_a_cut_by_measured_time(pool):
    first, *others = pool.run(programs.cut_by_time, {"pipeline": 2, "tensor": 2}, timeout=120)
    assert others == [first] * 3


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_float16_with_a_loss_scale(pool, one_process):
    options = {"policy": "mixed_float16", "optimizer": "clipnorm"}
    one = expected(one_process, **options)
    many = pool.run(
        programs.train,
        {"pipeline": 2},
        pipeline={"schedule": "zero-bubble"},
        **options,
        timeout=300,
    )
    for rank in many:
        # To the precision of float16, which rounds at other places in other graphs.
        np.testing.assert_allclose(rank.history["loss"], one.history["loss"], rtol=2e-3)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_the_graph_grows_with_micro_batches_and_no_faster(pool):
    for found in pool.run(programs.graph_sizes, {"pipeline": 2}, (4, 8, 16), timeout=300):
        (four, eight, sixteen), waits, seconds = found
        assert sixteen - eight <= 2.02 * (eight - four)
        assert waits < 2
        assert seconds < 60


REFUSALS = {
    "stages": "ValueError: A chain of 1 parts cannot be split into 2 stages",
    "untrained": "Each rank of a pipeline requires trainable weights that a loss depends on. Received: none on rank 0 in rescaling",
    "shape": "must know the shapes of the tensors it receives. Received: the input `features` of shape (4, None, 4)",
    "rows": "must be divisible by 2, the number of micro-batches",
    "unknown-rows": "must be divisible by 2, the number of micro-batches",
    "call": "cannot be called on one rank, which holds only a part of it",
}


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(pool, what):
    for rank, said in enumerate(pool.run(programs.refusal, {"pipeline": 2}, what, timeout=120)):
        assert REFUSALS[what] in said, f"rank {rank}: {said}"
