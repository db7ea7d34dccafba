"""A pipeline schedule of one's own: GPipe in waves, which keeps the activations of one wave."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tests.conftest import on_ranks
from tfdist.extend import Action, Schedule, check_schedule


def bubble(run) -> float:
    """Mean idle time of ranks over their computing time, as in the papers."""
    return run.idle_share / (1 - run.idle_share)


def two_waves(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards and then all backwards of the first half of the micro-batches, and then of the second."""
    half = num_microbatches // 2
    waves = range(half), range(half, num_microbatches)
    actions = tuple(
        tuple(
            Action(kind, rank, microbatch)
            for wave in waves
            for kind in (Action.FORWARD, Action.BACKWARD)
            for microbatch in wave
        )
        for rank in range(num_ranks)
    )
    return Schedule("two-waves", num_ranks, num_microbatches, 1, False, actions)


def test_its_bubble_beside_those_of_others():
    # p - 1 idle forwards and backwards for each wave: 2 (p - 1) / m of the work.
    assert bubble(check_schedule(two_waves(2, 8))) == pytest.approx(2 / 8)
    for name in ("gpipe", "1f1b"):
        other = check_schedule(tfdist.pipeline.make_schedule(name, 2, 8))
        assert bubble(other) == pytest.approx(1 / 8)


def trained(schedule, strategy=None):
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(12, 6)).astype("float32"), random.integers(0, 3, 12)

    def build():
        layers = [keras.layers.Dense(5, activation="tanh") for _ in range(3)]
        return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])

    def compiled(model):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    if strategy is None:
        model = compiled(build())
    else:
        with strategy.scope():
            model = compiled(
                tfdist.pipeline.PipelineModel(build(), num_microbatches=4, schedule=schedule)
            )
    history = model.fit(x, y, batch_size=12, epochs=4, shuffle=False, verbose=0).history
    return history["loss"], model.evaluate(x, y, batch_size=12, verbose=0)


def on_two_stages(schedule):
    return trained(schedule, tfdist.testing.strategy(tfdist.Mesh(pipeline=2)))


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("is_made", [False, True], ids=["function", "schedule"])
def test_it_trains_as_one_process(pool, is_made):
    schedule = two_waves(2, 4) if is_made else two_waves
    losses, evaluation = trained(None)
    for found, evaluated in pool.run(on_two_stages, schedule, timeout=240):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose(evaluated, evaluation, rtol=1e-5)


def refused(schedule) -> str:
    with pytest.raises(ValueError) as caught:
        on_two_stages(schedule)
    return str(caught.value)


def backward_first(num_ranks: int, num_microbatches: int) -> Schedule:
    good = two_waves(num_ranks, num_microbatches)
    actions = tuple(tuple(reversed(each)) for each in good.actions)
    return Schedule("backward-first", num_ranks, num_microbatches, 1, False, actions)


@on_ranks(("horovod", 2))
def test_what_cannot_run_is_refused(pool):
    for said in pool.run(refused, backward_first, timeout=120):
        assert "backward-first" in said and "rank 0 at B" in said
    for said in pool.run(refused, two_waves(2, 8), timeout=120):
        assert "4 micro-batches" in said and "Received: one for 2 ranks and 8 micro-batches" in said
