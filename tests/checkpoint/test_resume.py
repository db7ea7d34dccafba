"""A training that was interrupted anywhere ends as one that was not, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint import resume_programs
from tests.conftest import on_ranks

STEPS = resume_programs.EPOCHS * resume_programs.BATCHES


def check(pool, folder, mesh, interrupts, **options):
    """Compares with a training whose saves end it now and then."""
    whole = pool.run(resume_programs.trained, mesh, f"{folder}/whole", timeout=240, **options)
    done = 0
    for steps in interrupts:
        found = pool.run(
            resume_programs.trained,
            mesh,
            f"{folder}/parts",
            interrupt=steps,
            timeout=240,
            **options,
        )
        assert all(each is None for each in found), (steps, done)
        done += steps
    parts = pool.run(resume_programs.trained, mesh, f"{folder}/parts", timeout=240, **options)
    for right, found in zip(whole, parts, strict=True):
        assert_same(found, right)


def assert_same(found, right):
    assert found[:3] == right[:3]
    for one, other in zip(right[3], found[3], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("feed", ["arrays", "repeated", "shuffled", "unknown"])
def test_alone(one_process, tmp_path, feed):
    # Before the first save, in the middle of an epoch, at the end of one, and where none is new.
    check(one_process, tmp_path, {"data": 1}, [3, 6, 10, 2], feed=feed)


@pytest.mark.slow
def test_at_an_end_that_nobody_knew(one_process, tmp_path):
    """Keras begins a batch to see that there is none; a save comes before each."""
    options = {"feed": "unknown", "every_steps": 5, "asynchronous": False}
    check(one_process, tmp_path, {"data": 1}, [resume_programs.BATCHES], **options)


@pytest.mark.slow
@pytest.mark.parametrize("saver_last", [False, True])
def test_at_the_end_of_an_epoch(one_process, tmp_path, saver_last):
    """Callbacks begin the next epoch once, before or after the Checkpointer."""
    options = {"every_steps": resume_programs.BATCHES, "asynchronous": False}
    options["saver_last"] = saver_last
    check(one_process, tmp_path, {"data": 1}, [resume_programs.BATCHES + 1], **options)


@pytest.mark.slow
@pytest.mark.parametrize("feed", ["arrays", "unknown"])
def test_executions_of_other_lengths(one_process, tmp_path, feed):
    """They begin where the batches that are done are no multiple of them."""

    def run(name: str, steps_per_execution: int, interrupt: int | None = None):
        return one_process.run(
            resume_programs.trained,
            {"data": 1},
            f"{tmp_path}/{name}",
            feed=feed,
            interrupt=interrupt,
            steps_per_execution=steps_per_execution,
            every_steps=1,
            asynchronous=False,
            timeout=240,
        )[0]

    # Batches 0 to 4; 5 to 8; 9, and in the next epoch 0 to 2 and 3 to 5; 6 to 9 and another epoch.
    for steps_per_execution, executions in ((1, 5), (4, 1), (3, 3)):
        assert run("parts", steps_per_execution, executions) is None
    assert_same(run("parts", 4), run("whole", 4))


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("saver_last", [False, True])
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_averages_that_are_in_the_model(pool, tmp_path, swap_on_epoch, saver_last):
    options = {"build_model": resume_programs.averaged, "swap_on_epoch": swap_on_epoch}
    interrupts = [resume_programs.BATCHES + 1, 6]
    options |= {"every_steps": 5, "asynchronous": False, "saver_last": saver_last}
    check(pool, tmp_path, {"data": 2}, interrupts, **options)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_data_parallel(pool, tmp_path):
    check(pool, tmp_path, {"data": 2}, [7, 9])


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_shards(pool, tmp_path):
    check(pool, tmp_path, {"zero_stage": 3}, [7], build_model=resume_programs.gpt)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_experts(pool, tmp_path, zero_stage):
    mesh = {"data": 1, "expert": 2, "zero_stage": zero_stage}
    check(pool, tmp_path, mesh, [7], build_model=resume_programs.experts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4},
        {"data": 1, "tensor": 4},
        {"data": 1, "pipeline": 4},
        {"data": 4, "zero_stage": 3},
        {"data": 2, "tensor": 2},
    ],
    ids=str,
)
def test_gpt(pool, tmp_path, mesh):
    check(pool, tmp_path, mesh, [7, 9], build_model=resume_programs.gpt)
