"""`fit` with compressed gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.slow_links import programs
from tests.conftest import on_ranks, slow_but
from tfdist.addons.slow_links.meter import CompressionStatistics, Meter


def in_one_process(**options):
    from tfdist.strategies import LocalStrategy

    return programs.fitted(LocalStrategy(), 50, 4, **options)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("zero_stage", slow_but([2], [0, 1, 2]))
def test_full_rank_is_plain_training(pool, one_process, zero_stage):
    """PowerSGD of a rank that the matrices do not exceed sends all that there is."""
    arguments = {"rank": 64, "min_compression_rate": 0.01, "start_step": 3}
    expected, _ = one_process.run(in_one_process)[0]
    for weights, _ in pool.run(
        programs.train, "PowerSGD", arguments, zero_stage=zero_stage, timeout=120
    ):
        for mine, value in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, value, rtol=0, atol=2e-5)


OTHERS = {
    "accumulated": {"accumulate": 2},
    "scaled": {"scaled": True},
    "zero": {"zero_stage": 2},
}


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("kind", "arguments", "other"),
    slow_but(
        [("PowerSGD", {"rank": 2}, "scaled"), ("TopK", {"ratio": 0.1}, "accumulated")],
        [
            (kind, arguments, other)
            for kind, arguments in (
                ("PowerSGD", {"rank": 2}),
                ("TopK", {"ratio": 0.1}),
                ("TopK", {"ratio": 0.1, "momentum_correction": 0.5}),
                ("OneBit", {"block": 64}),
                ("Int8", {}),
                ("Int4", {}),
            )
            for other in OTHERS
        ],
    ),
)
def test_learns_alike_on_all_ranks(pool, kind, arguments, other):
    ranks = pool.run(
        programs.train, kind, {**arguments, "start_step": 2}, timeout=120, **OTHERS[other]
    )
    for weights, losses in ranks:
        for mine, first in zip(weights, ranks[0][0], strict=True):
            np.testing.assert_array_equal(mine, first)
        assert losses[-1] < losses[0]
        assert np.isfinite(losses).all()


def measured(kind: str, arguments: dict):
    """What was measured of a training, and the bytes that this rank sent in a step of it."""
    import keras

    from tfdist.addons import slow_links
    from tfdist.addons.slow_links import compression_statistics
    from tfdist.testing import strategy
    from tfdist.testing.traffic import traffic

    on = strategy(compression=getattr(slow_links, kind)(**arguments))
    with on.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    sent = []

    class Traffic(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sent.append(traffic().sent)

    x = np.random.default_rng(0).normal(size=(80, 256)).astype("float32")
    model.fit(x, np.tile(x, 2), batch_size=8, verbose=0, callbacks=[Traffic()])
    return compression_statistics(model), np.diff(sent)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("kind", "arguments", "payload"),
    [
        # Factors of rank 2; 1% of the values, with places; signs and scales; levels and units.
        ("PowerSGD", {"rank": 2}, 2 * (256 + 512) * 4),
        ("TopK", {"ratio": 0.01}, 1311 * 8),
        ("OneBit", {}, (256 * 512 / 8 + 128 * 4)),
        ("Int8", {}, (256 * 512 + 512 * 4)),
        ("Int4", {}, (256 * 512 / 2 + 512 * 4)),
    ],
)
def test_bytes_on_the_wire(pool, kind, arguments, payload):
    for found, sent in pool.run(measured, kind, {**arguments, "start_step": 4}, timeout=120):
        # Whole: of a sum over two ranks each sends as much as it has. Then what the formula says.
        assert abs(sent[1] - 256 * 512 * 4) < 2000
        assert abs(sent[-1] - payload) < 2000
        assert found.gradient_bytes == 256 * 512 * 4
        assert found.payload_bytes == pytest.approx(payload, rel=0.01)
        assert (found.whole_steps, found.compressed_steps) == (3, 5)
        verdict = "pays" if found.pays else "does not pay"
        assert f"It {verdict} on this link" in str(found)


def test_what_may_be_chance_does_not_pay():
    def measured(saved: float, error: float) -> CompressionStatistics:
        return CompressionStatistics(9, 50, 1e6, 1e5, 0.1, 0.1 - saved, 0.01, 0.02, error)

    assert measured(0.03, 0.01).pays and "It pays on this link" in str(measured(0.03, 0.01))
    assert not measured(0.015, 0.01).pays
    assert "does not pay on this link: a step is 15 ms shorter, which may be chance." in str(
        measured(0.015, 0.01)
    )
    assert str(measured(-0.02, 0.01)).endswith("does not pay on this link: a step is 20 ms longer.")


def test_the_error_is_that_of_medians():
    """Of normal numbers: the medians of many draws spread as much as `error` says of one."""
    rng, meter = np.random.default_rng(0), Meter()
    for rows, steps in zip(meter._rows, meter._steps, strict=True):
        rows.assign(rng.normal(0.1, 0.02, rows.shape))
        steps.assign(64)
    draws = np.median(rng.normal(0.1, 0.02, (2, 4000, 63)), axis=2)
    assert meter.read().error == pytest.approx(np.std(draws[0] - draws[1]), rel=0.3)
