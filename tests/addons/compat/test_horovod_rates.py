"""Horovod's warm-up and schedules on Keras 3: rates against numbers worked out by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.compat.fits import (
    FourReplicas,
    Rates,
    fit,
    fit_on_four,
    one_weight_model,
    weight_of,
)
from tfdist.addons.compat.horovod import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tfdist.learning_rate import ScaledWarmup


def test_warmup_sets_the_rate_of_every_step():
    callback = LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=1)
    model, rates, history = fit_on_four(callback, epochs=2)
    # 0.1 * (3 * (b + 1) / 3 + 1), and then the full rate.
    np.testing.assert_allclose(rates, [0.2, 0.3, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [0.4, 0.4], rtol=1e-6)
    # The rates are those that the compiled step used: four replicas make the gradient 1/4.
    assert weight_of(model) == pytest.approx(-(0.2 + 0.3 + 5 * 0.4 - 0.4) / 4, rel=1e-5)


def test_warmup_is_horovods_formula_at_fractional_epochs():
    initial_lr, size, warmup, steps = 0.4, 4, 3, 5
    _, rates, _ = fit_on_four(
        LearningRateWarmupCallback(initial_lr, warmup_epochs=warmup), steps=steps, epochs=warmup
    )
    expected = []
    for epoch in range(warmup):
        for batch in range(steps):
            fractional = epoch + batch / steps + 1 / steps
            expected.append(initial_lr * (1 / size * (fractional * (size - 1) / warmup + 1)))
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_warmup_over_a_fraction_does_not_overshoot():
    # 0.1 * (1 + 3 * min((b + 1) / 4 / 0.5, 1))
    _, rates, _ = fit_on_four(LearningRateWarmupCallback(0.4, warmup_epochs=0.5), steps=4)
    np.testing.assert_allclose(rates, [0.25, 0.4, 0.4, 0.4], rtol=1e-6)


def test_warmup_reaches_the_full_rate_with_several_steps_per_execution():
    with FourReplicas("/CPU:0").scope():
        model = one_weight_model(keras.optimizers.SGD(0.4), steps_per_execution=2)
    rates, _ = fit(model, [LearningRateWarmupCallback(0.4, warmup_epochs=1)], steps=4, epochs=2)
    # Executions begin at batches 0 and 2: 0.1 * (1 + 3 * 1 / 4) and 0.1 * (1 + 3 * 3 / 4).
    np.testing.assert_allclose(rates, [0.175, 0.325, 0.4, 0.4], rtol=1e-6)


def test_warmup_of_one_replica_or_no_epochs_leaves_the_rate():
    model = one_weight_model(keras.optimizers.SGD(0.4))
    rates, _ = fit(model, [LearningRateWarmupCallback(0.4, warmup_epochs=2)], epochs=2)
    np.testing.assert_allclose(rates, [0.4] * 6, rtol=1e-6)
    _, rates, _ = fit_on_four(LearningRateWarmupCallback(7.0, warmup_epochs=0))
    np.testing.assert_allclose(rates, [0.4] * 3, rtol=1e-6)


def test_warmup_resumes_where_the_epoch_says():
    _, rates, _ = fit_on_four(
        LearningRateWarmupCallback(0.4, warmup_epochs=2), epochs=3, initial_epoch=1
    )
    # Epochs (1 + (b + 1) / 3) of 2: 0.1 * (1 + 3 * (4, 5, 6) / 6).
    np.testing.assert_allclose(rates, [0.3, 0.35, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)


def test_warmup_says_when_it_is_over(capsys):
    fit_on_four(LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1), epochs=3)
    printed = capsys.readouterr().out
    assert printed.count("finished the warm-up") == 1
    assert "Epoch 2: finished the warm-up; the learning rate is 0.4." in printed


def test_staircase_with_a_constant_is_exponential_decay():
    model = one_weight_model(keras.optimizers.SGD(9.0))
    callback = LearningRateScheduleCallback(1.0, multiplier=0.5, start_epoch=1, end_epoch=4)
    rates, history = fit(model, [callback], steps=2, epochs=5)
    np.testing.assert_allclose(rates, [9, 9, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(history["lr"], [9, 1, 0.5, 0.25, 0.25])


def test_smooth_schedule_gets_fractional_epochs():
    epochs = []
    callback = LearningRateScheduleCallback(
        2.0, multiplier=lambda epoch: epochs.append(epoch) or 1 + epoch, staircase=False
    )
    rates, _ = fit(one_weight_model(keras.optimizers.SGD(2.0)), [callback], steps=4, epochs=2)
    np.testing.assert_allclose(epochs, np.arange(8) / 4)
    np.testing.assert_allclose(rates, 2 + np.arange(8) / 2)


def test_schedules_follow_a_warmup():
    """The usual list of a Horovod script: one callback for each stretch of epochs."""
    with FourReplicas("/CPU:0").scope():
        model = one_weight_model(keras.optimizers.SGD(0.4))
    callbacks = [
        LearningRateWarmupCallback(0.4, warmup_epochs=1),
        LearningRateScheduleCallback(0.4, multiplier=1.0, start_epoch=1, end_epoch=2),
        LearningRateScheduleCallback(0.4, multiplier=lambda epoch: 0.1, start_epoch=2),
    ]
    rates, _ = fit(model, callbacks, steps=2, epochs=3)
    np.testing.assert_allclose(rates, [0.25, 0.4, 0.4, 0.4, 0.04, 0.04], rtol=1e-6)


@pytest.mark.parametrize(
    "callback",
    [LearningRateWarmupCallback(0.1), LearningRateScheduleCallback(0.1, 0.5)],
    ids=["warmup", "schedule"],
)
@pytest.mark.parametrize(
    "learning_rate", [ScaledWarmup(learning_rate=0.1, replicas=2), lambda: 0.1], ids=type
)
def test_refuses_a_rate_that_cannot_be_assigned(callback, learning_rate):
    with pytest.raises(ValueError, match="Received: SGD with a schedule or a function"):
        fit(one_weight_model(keras.optimizers.SGD(learning_rate)), [callback])


def test_refuses_an_optimizer_of_several_rates():
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    model = one_weight_model(keras.optimizers.MultiOptimizer(optimizers))
    callback = LearningRateWarmupCallback(0.1)
    callback.set_model(model)
    with pytest.raises(ValueError, match="MultiOptimizer, which has several"):
        callback.on_train_begin()


def test_unknown_number_of_steps():
    def batches():
        for _ in range(4):
            yield np.ones([1, 1]), np.zeros([1, 1])

    model = one_weight_model(keras.optimizers.SGD(0.4))
    with pytest.raises(ValueError, match="Pass steps_per_epoch"):
        model.fit(batches(), callbacks=[LearningRateWarmupCallback(0.4)], verbose=0)
    with FourReplicas("/CPU:0").scope():
        model = one_weight_model(keras.optimizers.SGD(0.4))
    rates = Rates()
    callback = LearningRateWarmupCallback(0.4, warmup_epochs=1, steps_per_epoch=6)
    data = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec([1, 1]), tf.TensorSpec([1, 1]))
    )
    model.fit(data, callbacks=[callback, rates], verbose=0)
    np.testing.assert_allclose(rates.seen, [0.15, 0.2, 0.25, 0.3], rtol=1e-6)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateWarmupCallback(None), "Received: initial_lr=None"),
        (lambda: LearningRateWarmupCallback(-0.1), r"Received: initial_lr=-0\.1"),
        (lambda: LearningRateWarmupCallback(0.1, -1), "Received: warmup_epochs=-1"),
        (
            lambda: LearningRateWarmupCallback(0.1, steps_per_epoch=0),
            "Received: steps_per_epoch=0",
        ),
        (lambda: LearningRateScheduleCallback(0.1, None), "Received: multiplier=None"),
        (
            lambda: LearningRateScheduleCallback(0.1, 0.5, start_epoch=3, end_epoch=3),
            "must be greater than `start_epoch`. Received: start_epoch=3, end_epoch=3",
        ),
        (lambda: BroadcastGlobalVariablesCallback("0"), "Received: root_rank='0'"),
    ],
)
def test_refuses_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
