"""Local steps and syncs are those of plain Keras models, trained one by one and put together in NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.slow_links.local_sgd import programs
from tests.conftest import on_ranks

#: Of 96 rows each batch is full; the last of 90 has six, and the last of 86 two, so that of three
#: ranks one has none in it.
NUMBERS = (96, 90, 86)

STREAMS = (
    {"fragments": 2, "cut": ((0,), (1, 2, 3))},
    {"fragments": 2, "overlap": 1, "cut": ((0,), (1, 2, 3))},
    {"overlap": 3, "mixing": 0.25},
)


def several(on, cases):
    """The weights of some runs, so that a pool is asked once."""
    return [on(*arguments, **options)[0] for arguments, options in cases]


def fits(cases):
    def fit(*arguments, **options):
        options.pop("cut", None)
        return programs.fit_on_rank({}, *arguments, **options)

    return several(fit, cases)


def simulations(ranks: int, cases):
    def simulate(kind, inner, **options):
        return [programs.simulate(kind, inner, ranks, **options)]

    return several(simulate, cases)


def check(pool, one_process, cases):
    found = pool.run(fits, cases, timeout=600)
    expected = one_process.run(simulations, pool.num_ranks, cases, timeout=600)[0]
    for place, case in enumerate(cases):
        for weights in found:
            for own, chief, right in zip(
                weights[place], found[0][place], expected[place], strict=True
            ):
                np.testing.assert_array_equal(own, chief, err_msg=str(case))
                np.testing.assert_allclose(own, right, rtol=0, atol=1e-5, err_msg=str(case))


@pytest.mark.slow
@on_ranks(("horovod", 3), ("horovod", 2), ("tensorflow", 2), ("tensorflow", 3))
def test_each_kind(pool, one_process):
    cases = [
        (("local_sgd", "momentum"), {"number": 90}),
        (("slowmo", "sgd"), {"number": 96}),
        (("diloco", "adamw"), {"number": 86}),
    ]
    check(pool, one_process, cases)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
@pytest.mark.parametrize("inner", ["adamw", "clipped", "accumulated"])
def test_each_kind_with_each_inner_optimizer(pool, one_process, inner):
    kinds = ("local_sgd", "slowmo", "diloco")
    check(pool, one_process, [((kind, inner), {"number": n}) for kind in kinds for n in NUMBERS])


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3), ("horovod", 3))
def test_fragments_in_turn_and_beside_training(pool, one_process):
    numbers = NUMBERS[-1:] if pool.num_ranks == 2 else NUMBERS
    check(
        pool,
        one_process,
        [(("diloco", "adamw"), {"number": n, **stream}) for stream in STREAMS for n in numbers],
    )


@on_ranks(("horovod", 2), slow=[("horovod", 3), ("tensorflow", 2), ("tensorflow", 3)])
def test_a_sync_in_each_step_is_synchronous_training(pool):
    plain = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    cases = [
        ((None, "sgd"), {}),
        (("diloco", "sgd"), {"sync_every": 1, **plain}),
        (("local_sgd", "sgd"), {"sync_every": 1}),
        (("slowmo", "sgd"), {"sync_every": 1, "slow_momentum": 0.0}),
    ]
    for weights in pool.run(fits, cases, timeout=600):
        for others in weights[1:]:
            for own, right in zip(others, weights[0], strict=True):
                np.testing.assert_allclose(own, right, rtol=0, atol=1e-5)


def with_statistics():
    return keras.Sequential(
        [
            keras.Input((programs.FEATURES,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dense(programs.CLASSES),
        ]
    )


@on_ranks(("horovod", 2))
def test_moving_statistics_are_averaged_at_a_sync(pool, one_process):
    # In the last batch, which ends in a sync, one of the ranks has no row.
    case = (("local_sgd", "sgd"), {"number": 85, "make": with_statistics})
    streaming = {"cut": ((0, 1, 2, 3, 4, 5),)}
    found = pool.run(fits, [case], timeout=600)
    case[1].update(streaming)
    expected = one_process.run(simulations, 2, [case], timeout=600)[0]
    for weights in found:
        for own, right in zip(weights[0], expected[0], strict=True):
            np.testing.assert_allclose(own, right, rtol=0, atol=1e-5)


def losses_of_one_worker(learning_rate: float) -> list[float]:
    """Of a convex problem, after each sync of four steps."""
    from tfdist.addons.slow_links import DiLoCo
    from tfdist.testing import strategy

    with strategy().scope():
        x = keras.Variable(np.full(3, 5.0, "float32"))
        optimizer = DiLoCo(
            keras.optimizers.SGD(0.05),
            4,
            outer_learning_rate=learning_rate,
            outer_momentum=0.0,
        )
        found = []
        for step in range(20):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x.value**2)
            optimizer.apply([tape.gradient(loss, x.value)], [x])
            if step % 4 == 3:
                found.append(float(tf.reduce_sum(x.value**2)))
    return found


def test_the_outer_step_goes_downhill(one_process):
    """With the other sign, local minus global, the loss of one worker would rise at each sync."""
    (losses,) = one_process.run(losses_of_one_worker, 0.7)
    assert 75.0 > losses[0] > losses[1] > losses[2] > losses[3] > losses[4]
    assert losses[-1] < 7.5
