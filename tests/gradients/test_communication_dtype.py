"""Gradients that travel in a narrower dtype."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs

SIZE = 1001


def numbers(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=SIZE).astype("float32")


def sums(dtype: str, reduction: str) -> tuple[np.ndarray, int]:
    """The reduced numbers of all ranks, and the bytes that this rank has sent for them."""
    from tfdist.collectives.low_precision import narrow_all_reduce
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine
    from tfdist.testing.traffic import traffic

    group = engine().group()
    before = traffic().sent if isinstance(engine(), P2PEngine) else 0
    reduced = narrow_all_reduce(
        tf.constant(numbers(group.rank)), group, reduction, tf.as_dtype(dtype), name="narrow"
    )
    sent = traffic().sent - before if isinstance(engine(), P2PEngine) else 0
    return reduced.numpy(), sent


@on_ranks(("horovod", 3), ("tensorflow", 2))
@pytest.mark.parametrize(("dtype", "reduction"), [("bfloat16", "mean"), ("float16", "sum")])
def test_each_addend_and_the_sum_are_rounded_once(pool, dtype, reduction):
    results = pool.run(sums, dtype, reduction, timeout=60)

    def rounded(array):
        return tf.cast(tf.cast(array, dtype), tf.float32).numpy()

    addends = np.stack([rounded(numbers(rank)) for rank in range(len(results))])
    exact = getattr(np, reduction)(addends, axis=0)
    ulp = 2.0 ** (-7 if dtype == "bfloat16" else -10)
    for reduced, sent in results:
        np.testing.assert_array_equal(reduced, results[0][0])
        np.testing.assert_allclose(reduced, exact, rtol=ulp, atol=1e-6)
        np.testing.assert_array_equal(reduced, rounded(reduced))
        # Two times (n - 1) / n of the vector, at two bytes a number, and a few for the padding.
        n = len(results)
        if n == 3:  # TensorFlow's engine, of two, does not count.
            assert 2 * (n - 1) / n * SIZE * 2 <= sent <= 2 * (n - 1) / n * (SIZE + n) * 2 + 64


def train(stage: int, communication_dtype: str | None):
    from tfdist.testing import strategy

    return programs.train_images(
        strategy(zero_stage=stage, communication_dtype=communication_dtype),
        "mlp",
        "sgd",
        programs.UNEVEN_ROWS,
    )


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("stage", slow_but([3], [0, 1, 2, 3]))
def test_training(pool, one_process, stage):
    expected = one_process.run(
        programs.in_one_process, programs.train_images, "mlp", "sgd", programs.UNEVEN_ROWS
    )[0]
    results = pool.run(train, stage, "bfloat16", timeout=120)
    # Near, the same on all ranks, and not as if all had travelled in float32.
    programs.assert_same(results, expected, weights=0.02, logs=0.02)
    with pytest.raises(AssertionError):
        programs.assert_same(results, expected)


def test_only_narrow_floating_dtypes():
    from tfdist.strategies import LocalStrategy

    with pytest.raises(ValueError, match=r"communication_dtype.*int8"):
        LocalStrategy(communication_dtype="int8")
