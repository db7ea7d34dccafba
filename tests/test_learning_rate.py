"""The scaled rate and its warm-up, against numbers worked out by hand."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.learning_rate import ScaledWarmup, scaled_learning_rate


def _piecewise():
    """1 up to step 2, 0.1 up to step 6, 0.01 from then on."""
    return keras.optimizers.schedules.PiecewiseConstantDecay([2, 6], [1.0, 0.1, 0.01])


@pytest.mark.parametrize(
    ("replicas", "rule", "expected"),
    [(1, "linear", 0.1), (8, "linear", 0.8), (16, "sqrt", 0.4), (8, "none", 0.1)],
)
def test_scaled_learning_rate(replicas, rule, expected):
    assert scaled_learning_rate(0.1, replicas, rule) == pytest.approx(expected, rel=1e-15)


def test_linear_is_the_default_rule():
    assert scaled_learning_rate(0.25, 4) == 1.0
    assert ScaledWarmup(learning_rate=0.25, replicas=4)(0) == 1.0


# Four replicas, five epochs of eight steps: 40 steps of warm-up.
@pytest.mark.parametrize("epoch", [0, 0.125, 1, 2.5, 4.875, 5])
def test_linear_warmup_is_horovods_formula(epoch):
    schedule = ScaledWarmup(learning_rate=0.1, replicas=4, warmup_steps=40)
    initial_lr, size, warmup = 0.4, 4, 5
    horovod = initial_lr * (1 / size * (epoch * (size - 1) / warmup + 1))
    assert float(schedule(int(epoch * 8))) == pytest.approx(horovod, rel=1e-6)


def test_linear_warmup_by_hand():
    schedule = ScaledWarmup(learning_rate=0.1, replicas=5, warmup_steps=4)
    rates = [float(schedule(step)) for step in range(7)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rtol=1e-6)


def test_sqrt_warmup_by_hand():
    schedule = ScaledWarmup(learning_rate=0.5, replicas=16, rule="sqrt", warmup_steps=6)
    rates = [float(schedule(step)) for step in (0, 1, 2, 3, 6, 100)]
    np.testing.assert_allclose(rates, [0.5, 0.75, 1.0, 1.25, 2.0, 2.0], rtol=1e-6)


def test_rule_none_leaves_the_rate_alone():
    schedule = ScaledWarmup(learning_rate=0.3, replicas=16, rule="none", warmup_steps=6)
    assert [float(schedule(step)) for step in (0, 3, 9)] == [pytest.approx(0.3)] * 3


def test_a_schedule_is_multiplied_at_each_step():
    schedule = ScaledWarmup(learning_rate=_piecewise(), replicas=4, warmup_steps=4)
    rates = [float(schedule(step)) for step in range(8)]
    expected = [1.0, 1.75, 2.5, 0.325, 0.4, 0.4, 0.4, 0.04]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_schedule_without_warmup_is_scaled():
    schedule = ScaledWarmup(learning_rate=_piecewise(), replicas=4)
    np.testing.assert_allclose([float(schedule(s)) for s in (0, 3, 7)], [4.0, 0.4, 0.04], rtol=1e-6)


@pytest.mark.parametrize("learning_rate", [0.1, _piecewise()], ids=["float", "schedule"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_eager_and_graph_agree_in_float32(learning_rate, warmup_steps):
    schedule = ScaledWarmup(learning_rate=learning_rate, replicas=4, warmup_steps=warmup_steps)
    graph = tf.function(schedule, input_signature=[tf.TensorSpec([], tf.int64)])
    for step in (0, 1, 3, 4, 9):
        inside = graph(tf.constant(step, tf.int64))
        assert inside.dtype == tf.float32
        assert inside.shape == []
        for outside in (
            step,
            tf.constant(step, tf.int64),
            keras.Variable(step, dtype="int64", trainable=False),
        ):
            assert schedule(outside).dtype == tf.float32
            assert float(schedule(outside)) == float(inside)


def test_long_warmups_count_every_step():
    """In float32 2**24 + 1 is 2**24; the last step must not fall short of the full rate."""
    steps = 2**24 + 1
    schedule = ScaledWarmup(learning_rate=1.0, replicas=2, warmup_steps=steps)
    assert float(schedule(tf.constant(steps, tf.int64))) == 2.0
    assert float(schedule(tf.constant(10 * steps, tf.int64))) == 2.0


@pytest.mark.parametrize("learning_rate", [0.1, _piecewise()], ids=["float", "schedule"])
def test_config_round_trip(learning_rate):
    schedule = ScaledWarmup(
        learning_rate=learning_rate, replicas=4, rule="sqrt", warmup_steps=7, name="rate"
    )
    config = json.loads(json.dumps(schedule.get_config()))
    twin = ScaledWarmup.from_config(config)
    assert isinstance(config["learning_rate"], (float, dict)), "from_config must not change it"
    assert twin.get_config() == schedule.get_config()
    other = keras.optimizers.schedules.deserialize(
        json.loads(json.dumps(keras.optimizers.schedules.serialize(schedule)))
    )
    assert isinstance(other, ScaledWarmup)
    for step in (0, 2, 5, 9):
        assert float(twin(step)) == float(other(step)) == float(schedule(step))


def test_saved_models_keep_it_and_train_on(tmp_path):
    """Three steps, saved, loaded, three more; the gradient is 1, so the weight counts the rates."""

    def steps(model, count):
        model.fit(np.ones([count, 1]), np.zeros([count, 1]), batch_size=1, verbose=0)

    def weight(model):
        return float(model.get_weights()[0][0, 0])

    model = keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    rate = ScaledWarmup(learning_rate=_piecewise(), replicas=4, warmup_steps=4)
    model.compile(keras.optimizers.SGD(rate), loss=_mean_prediction)
    steps(model, 3)
    assert weight(model) == pytest.approx(-(1.0 + 1.75 + 2.5), rel=1e-6)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # `learning_rate` is the rate of the next step, which is step 3.
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.325)
    assert isinstance(loaded.optimizer._learning_rate, ScaledWarmup)
    assert loaded.optimizer._learning_rate.get_config() == rate.get_config()
    steps(loaded, 3)
    assert weight(loaded) == pytest.approx(-(5.25 + 0.325 + 0.4 + 0.4), rel=1e-6)


@keras.saving.register_keras_serializable(package="tfdist_tests")
def _mean_prediction(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 0}, r"`replicas` must be .* Received: replicas=0"),
        ({"replicas": -2}, "Received: replicas=-2"),
        ({"replicas": 2.0}, r"Received: replicas=2\.0"),
        ({"replicas": True}, "Received: replicas=True"),
        ({"rule": "cubic"}, "`rule` must be one of .*'sqrt'.* Received: rule='cubic'"),
        ({"learning_rate": 0.0}, r"Received: learning_rate=0\.0"),
        ({"learning_rate": -1.0}, r"Received: learning_rate=-1\.0"),
        ({"learning_rate": float("nan")}, "Received: learning_rate=nan"),
        ({"learning_rate": "fast"}, "Received: learning_rate='fast'"),
    ],
)
def test_refuses(arguments, message):
    arguments = {"learning_rate": 0.1, "replicas": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        scaled_learning_rate(**arguments)
    with pytest.raises(ValueError, match=message):
        ScaledWarmup(**arguments)


@pytest.mark.parametrize("warmup_steps", [-1, 1.5, True])
def test_refuses_warmup_steps(warmup_steps):
    with pytest.raises(ValueError, match=f"Received: warmup_steps={warmup_steps}"):
        ScaledWarmup(learning_rate=0.1, replicas=2, warmup_steps=warmup_steps)
