"""1-bit Adam: AdamW whose second moments stay, and whose momentum travels compressed."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.addons.slow_links import programs
from tests.addons.slow_links.test_training import in_one_process
from tests.conftest import on_ranks, slow_but
from tfdist.addons.slow_links import OneBitAdam

EXACT = {"rank": 64, "min_compression_rate": 0.01, "start_step": 3}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("options", slow_but([{}], [{"accumulate": 2}, {"scaled": True}]))
def test_what_loses_nothing_is_one_process(pool, one_process, options):
    """By a compressor that is exact. 20 steps, the last batch of an epoch has 2 rows of 12."""
    options = {"freeze": 3, **options}
    expected, _ = one_process.run(in_one_process, **options)[0]
    for weights, _ in pool.run(programs.train, "PowerSGD", EXACT, timeout=120, **options):
        for mine, value in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, value, rtol=0, atol=1e-4)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("kind", "arguments"), [("OneBit", {"block": 64}), ("TopK", {"ratio": 0.1})]
)
def test_learns_alike_on_all_ranks(pool, kind, arguments):
    ranks = pool.run(programs.train, kind, {**arguments, "start_step": 5}, freeze=5, timeout=120)
    for weights, losses in ranks:
        for mine, first in zip(weights, ranks[0][0], strict=True):
            np.testing.assert_array_equal(mine, first)
        assert losses[-1] < losses[0]


def refusals() -> list[str]:
    found = []
    for arguments, options in (
        ({"start_step": 4}, {"freeze": 5}),
        ({"start_step": 5}, {"freeze": 5, "zero_stage": 1}),
    ):
        try:
            programs.train("OneBit", arguments, **options)
        except ValueError as error:
            found.append(str(error))
    return found


@on_ranks(("horovod", 2))
def test_what_it_does_not_go_with_is_said(pool):
    early, zero = pool.run(refusals, timeout=120)[0]
    assert "freeze_step=5, OneBit(" in early and "Use the same number for both." in early
    assert "zero_stage=1" in zero and "use AdamW" in zero


def test_until_then_it_is_adamw():
    """And then v stays, so that it is another one."""
    found = {}
    for name, optimizer in {
        "adamw": keras.optimizers.AdamW(0.01, weight_decay=0.1),
        "late": OneBitAdam(0.01, 100, weight_decay=0.1),
        "early": OneBitAdam(0.01, 2, weight_decay=0.1),
    }.items():
        keras.utils.set_random_seed(0)
        # Of a table only some rows have a gradient in a step.
        ids, flat = keras.Input((8,), dtype="int32"), keras.layers.Flatten()
        vectors = flat(keras.layers.Embedding(40, 4)(ids))
        model = keras.Model(ids, keras.layers.Dense(4)(vectors))
        model.compile(optimizer, "mse")
        random = np.random.default_rng(0)
        x, y = random.integers(0, 40, (20, 8)), random.normal(size=(20, 4))
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found[name] = model.get_weights()
    for late, early, adamw in zip(
        *(found[name] for name in ("late", "early", "adamw")), strict=True
    ):
        np.testing.assert_allclose(late, adamw, rtol=1e-5, atol=1e-6)
        assert np.abs(early - adamw).max() > 1e-3


def test_there_and_back():
    optimizer = OneBitAdam(0.01, 7, beta_1=0.8, weight_decay=0.2)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is OneBitAdam and again.get_config() == optimizer.get_config()
    assert (again.freeze_step, again.beta_1, again.weight_decay) == (7, 0.8, 0.2)


@pytest.mark.parametrize(
    "options",
    [{"freeze_step": 0}, {"global_clipnorm": 1.0}, {"amsgrad": True}, {"beta_1": 0.0}],
    ids=str,
)
def test_bad_arguments_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        OneBitAdam(**options)
