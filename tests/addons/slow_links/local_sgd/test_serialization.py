"""What the constructors take, and that Keras' configurations give it back."""

from __future__ import annotations

import keras
import pytest

from tfdist.addons import slow_links


@pytest.mark.parametrize(
    ("name", "inner", "arguments"),
    [
        ("LocalSGD", "sgd", {"sync_every": 3, "name": "own"}),
        ("SlowMo", "adam", {"sync_every": 4, "slow_momentum": 0.5, "slow_learning_rate": 2.0}),
        (
            "DiLoCo",
            "adamw",
            {
                "sync_every": 12,
                "outer_learning_rate": 0.5,
                "outer_momentum": 0.8,
                "nesterov": False,
                "fragments": 3,
                "overlap": 2,
                "mixing": 0.25,
                "within": "host",
            },
        ),
    ],
)
def test_there_and_back(name, inner, arguments):
    optimizer = getattr(slow_links, name)(inner, **arguments)
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert type(again.inner_optimizer) is type(keras.optimizers.get(inner))
    for argument, value in arguments.items():
        assert getattr(again, argument) == value, argument
    again.learning_rate = 0.125
    assert float(again.inner_optimizer.learning_rate) == 0.125


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense", 4), "inner='nonsense'"),
        ((keras.optimizers.Adam, 4), "inner="),
        (("adam", 0), "sync_every=0"),
        (("adam", 4, {"fragments": 3}), "fragments=3"),
        (("adam", 4, {"overlap": 4}), "overlap=4"),
        (("adam", 4, {"mixing": 1.0}), "mixing=1.0"),
        (("adam", 4, {"outer_momentum": 1.0}), "outer_momentum=1.0"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    *positional, options = (*arguments, {}) if len(arguments) == 2 else arguments
    with pytest.raises((ValueError, TypeError)) as caught:
        slow_links.DiLoCo(*positional, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrappers_stand_in_the_right_order():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    for inner in (scaled, slow_links.LocalSGD("adam", 2)):
        with pytest.raises(ValueError, match="must wrap this one"):
            slow_links.DiLoCo(inner, 4)
    with pytest.raises(ValueError, match="use_ema"):
        slow_links.DiLoCo(keras.optimizers.Adam(use_ema=True), 4)
