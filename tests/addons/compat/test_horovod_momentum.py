"""Horovod's correction of momentum on Keras 3: weights against numbers worked out by hand."""

from __future__ import annotations

import keras
import pytest

from tests.addons.compat.fits import fit, one_weight_model, weight_of
from tfdist.addons.compat.horovod import LearningRateScheduleCallback, LearningRateWarmupCallback


def _doubling(momentum_correction):
    return LearningRateScheduleCallback(
        1.0,
        multiplier=lambda epoch: 2.0 ** round(3 * epoch),
        staircase=False,
        momentum_correction=momentum_correction,
    )


# Rates 1, 2, 4 and momentum 1/2. Corrected: v = 1, 1/2*2*1 + 2 = 3, 1/2*2*3 + 4 = 7, so 11 in
# all. Not corrected: v = 1, 1/2*1 + 2 = 2.5, 1/2*2.5 + 4 = 5.25, so 8.75.
@pytest.mark.parametrize(("momentum_correction", "distance"), [(True, 11.0), (False, 8.75)])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["compiled", "eager"])
def test_momentum_correction_of_sgd(momentum_correction, distance, run_eagerly):
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model = one_weight_model(optimizer, run_eagerly=run_eagerly)
    fit(model, [_doubling(momentum_correction)])
    assert weight_of(model) == -distance
    assert optimizer.momentum == 0.5


def test_momentum_correction_with_nesterov_leaves_the_lookahead():
    # v = 1, 3, 7 as above; each step moves by v / 2 + rate: 1.5, 3.5, 7.5.
    model = one_weight_model(keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True))
    fit(model, [_doubling(True)])
    assert weight_of(model) == -12.5


def test_momentum_correction_of_rmsprop():
    # With rho 0 the gradient 1 is divided by its own size: the same numbers as SGD.
    model = one_weight_model(keras.optimizers.RMSprop(1.0, rho=0.0, momentum=0.5, epsilon=0.0))
    fit(model, [_doubling(True)])
    assert weight_of(model) == pytest.approx(-11.0, rel=1e-6)


def test_momentum_correction_reaches_through_a_loss_scale():
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model = one_weight_model(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0))
    fit(model, [_doubling(True)])
    assert weight_of(model) == -11.0


def test_momentum_correction_with_gradient_accumulation():
    # Updates after steps 2 and 4, at rates 2 and 8: v = 2, 1/2*4*2 + 8 = 12.
    model = one_weight_model(keras.optimizers.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2))
    callback = LearningRateScheduleCallback(
        1.0, multiplier=lambda epoch: 2.0 ** round(4 * epoch), staircase=False
    )
    fit(model, [callback], steps=4)
    assert weight_of(model) == -14.0


def test_momentum_correction_of_a_rate_that_was_zero():
    # Rates 1, 0, 4: v = 1, 0, 4.
    model = one_weight_model(keras.optimizers.SGD(1.0, momentum=0.5))
    callback = LearningRateScheduleCallback(
        1.0, multiplier=lambda epoch: (1.0, 0.0, 4.0)[round(3 * epoch)], staircase=False
    )
    fit(model, [callback])
    assert weight_of(model) == -5.0


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Muon])
def test_optimizers_whose_state_holds_no_rate_are_left_alone(optimizer):
    weights = []
    for momentum_correction in (True, False):
        model = one_weight_model(optimizer(1.0))
        fit(model, [_doubling(momentum_correction)])
        weights.append(weight_of(model))
    assert weights[0] == weights[1] != 0.0


def test_refuses_a_momentum_that_it_does_not_know():
    class HeavyBall(keras.optimizers.Adam):
        momentum = 0.9

    message = r"does not support the momentum of HeavyBall.* Pass momentum_correction=False"
    with pytest.raises(ValueError, match=message):
        fit(one_weight_model(HeavyBall(0.1)), [LearningRateWarmupCallback(0.1)])
    fit(
        one_weight_model(HeavyBall(0.1)),
        [LearningRateWarmupCallback(0.1, momentum_correction=False)],
    )
