"""Horovod's callbacks on Keras 3: rates and weights against numbers worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.compat.horovod import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from tfdist.learning_rate import ScaledWarmup
from tfdist.testing import RankPool


@pytest.mark.parametrize(
    ("name", "words"),
    [("init", "HorovodStrategy()"), ("size", "strategy.mesh.size"), ("join", "'join'")],
)
def test_other_names_of_horovod_say_what_takes_their_place(name, words):
    with pytest.raises(AttributeError, match=r"docs/migrate_from_horovod\.md") as caught:
        getattr(tfdist.compat.horovod, name)
    assert words in str(caught.value)
    assert not hasattr(tfdist.compat.horovod, "__wrapped__")


class _FourReplicas(tf.distribute.OneDeviceStrategy):
    """One device that says it is four: Keras then divides the loss by four."""

    num_replicas_in_sync = 4


class _Rates(keras.callbacks.Callback):
    """Writes down the rate that each step ran with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def _model(optimizer, **compile_arguments):
    """One weight, from 0, whose gradient is 1 for a batch of ones."""
    model = keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(
        optimizer,
        loss=lambda y_true, y_pred: keras.ops.mean(y_pred, axis=-1),
        **compile_arguments,
    )
    return model


def _weight(model):
    return float(model.get_weights()[0][0, 0])


def _fit(model, callbacks, steps=3, **arguments):
    """Trains for `steps` steps an epoch; returns the rate of each step, and the history."""
    rates = _Rates()
    history = model.fit(
        np.ones([steps, 1]),
        np.zeros([steps, 1]),
        batch_size=1,
        verbose=0,
        callbacks=[*callbacks, rates],
        **arguments,
    )
    return rates.seen, history.history


def _fit_on_four(callback, **arguments):
    with _FourReplicas("/CPU:0").scope():
        model = _model(keras.optimizers.SGD(0.4))
    return model, *_fit(model, [callback], **arguments)


def test_warmup_sets_the_rate_of_every_step():
    callback = LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=1)
    model, rates, history = _fit_on_four(callback, epochs=2)
    # 0.1 * (3 * (b + 1) / 3 + 1), and then the full rate.
    np.testing.assert_allclose(rates, [0.2, 0.3, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [0.4, 0.4], rtol=1e-6)
    # The rates are those that the compiled step used: four replicas make the gradient 1/4.
    assert _weight(model) == pytest.approx(-(0.2 + 0.3 + 5 * 0.4 - 0.4) / 4, rel=1e-5)


def test_warmup_is_horovods_formula_at_fractional_epochs():
    initial_lr, size, warmup, steps = 0.4, 4, 3, 5
    _, rates, _ = _fit_on_four(
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
    _, rates, _ = _fit_on_four(LearningRateWarmupCallback(0.4, warmup_epochs=0.5), steps=4)
    np.testing.assert_allclose(rates, [0.25, 0.4, 0.4, 0.4], rtol=1e-6)


def test_warmup_reaches_the_full_rate_with_several_steps_per_execution():
    with _FourReplicas("/CPU:0").scope():
        model = _model(keras.optimizers.SGD(0.4), steps_per_execution=2)
    rates, _ = _fit(model, [LearningRateWarmupCallback(0.4, warmup_epochs=1)], steps=4, epochs=2)
    # Executions begin at batches 0 and 2: 0.1 * (1 + 3 * 1 / 4) and 0.1 * (1 + 3 * 3 / 4).
    np.testing.assert_allclose(rates, [0.175, 0.325, 0.4, 0.4], rtol=1e-6)


def test_warmup_of_one_replica_or_no_epochs_leaves_the_rate():
    model = _model(keras.optimizers.SGD(0.4))
    rates, _ = _fit(model, [LearningRateWarmupCallback(0.4, warmup_epochs=2)], epochs=2)
    np.testing.assert_allclose(rates, [0.4] * 6, rtol=1e-6)
    _, rates, _ = _fit_on_four(LearningRateWarmupCallback(7.0, warmup_epochs=0))
    np.testing.assert_allclose(rates, [0.4] * 3, rtol=1e-6)


def test_warmup_resumes_where_the_epoch_says():
    _, rates, _ = _fit_on_four(
        LearningRateWarmupCallback(0.4, warmup_epochs=2), epochs=3, initial_epoch=1
    )
    # Epochs (1 + (b + 1) / 3) of 2: 0.1 * (1 + 3 * (4, 5, 6) / 6).
    np.testing.assert_allclose(rates, [0.3, 0.35, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)


def test_warmup_says_when_it_is_over(capsys):
    _fit_on_four(LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1), epochs=3)
    printed = capsys.readouterr().out
    assert printed.count("warm-up is over") == 1
    assert "Epoch 2: the warm-up is over; the learning rate is 0.4." in printed


def test_staircase_with_a_constant_is_exponential_decay():
    model = _model(keras.optimizers.SGD(9.0))
    callback = LearningRateScheduleCallback(1.0, multiplier=0.5, start_epoch=1, end_epoch=4)
    rates, history = _fit(model, [callback], steps=2, epochs=5)
    np.testing.assert_allclose(rates, [9, 9, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(history["lr"], [9, 1, 0.5, 0.25, 0.25])


def test_smooth_schedule_gets_fractional_epochs():
    epochs = []
    callback = LearningRateScheduleCallback(
        2.0, multiplier=lambda epoch: epochs.append(epoch) or 1 + epoch, staircase=False
    )
    rates, _ = _fit(_model(keras.optimizers.SGD(2.0)), [callback], steps=4, epochs=2)
    np.testing.assert_allclose(epochs, np.arange(8) / 4)
    np.testing.assert_allclose(rates, 2 + np.arange(8) / 2)


def test_schedules_follow_a_warmup():
    """The usual list of a Horovod script: one callback for each stretch of epochs."""
    with _FourReplicas("/CPU:0").scope():
        model = _model(keras.optimizers.SGD(0.4))
    callbacks = [
        LearningRateWarmupCallback(0.4, warmup_epochs=1),
        LearningRateScheduleCallback(0.4, multiplier=1.0, start_epoch=1, end_epoch=2),
        LearningRateScheduleCallback(0.4, multiplier=lambda epoch: 0.1, start_epoch=2),
    ]
    rates, _ = _fit(model, callbacks, steps=2, epochs=3)
    np.testing.assert_allclose(rates, [0.25, 0.4, 0.4, 0.4, 0.04, 0.04], rtol=1e-6)


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
    model = _model(optimizer, run_eagerly=run_eagerly)
    _fit(model, [_doubling(momentum_correction)])
    assert _weight(model) == -distance
    assert optimizer.momentum == 0.5


def test_momentum_correction_with_nesterov_leaves_the_lookahead():
    # v = 1, 3, 7 as above; each step moves by v / 2 + rate: 1.5, 3.5, 7.5.
    model = _model(keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True))
    _fit(model, [_doubling(True)])
    assert _weight(model) == -12.5


def test_momentum_correction_of_rmsprop():
    # With rho 0 the gradient 1 is divided by its own size: the same numbers as SGD.
    model = _model(keras.optimizers.RMSprop(1.0, rho=0.0, momentum=0.5, epsilon=0.0))
    _fit(model, [_doubling(True)])
    assert _weight(model) == pytest.approx(-11.0, rel=1e-6)


def test_momentum_correction_reaches_through_a_loss_scale():
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model = _model(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0))
    _fit(model, [_doubling(True)])
    assert _weight(model) == -11.0


def test_momentum_correction_with_gradient_accumulation():
    # Updates after steps 2 and 4, at rates 2 and 8: v = 2, 1/2*4*2 + 8 = 12.
    model = _model(keras.optimizers.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2))
    callback = LearningRateScheduleCallback(
        1.0, multiplier=lambda epoch: 2.0 ** round(4 * epoch), staircase=False
    )
    _fit(model, [callback], steps=4)
    assert _weight(model) == -14.0


def test_momentum_correction_of_a_rate_that_was_zero():
    # Rates 1, 0, 4: v = 1, 0, 4.
    model = _model(keras.optimizers.SGD(1.0, momentum=0.5))
    callback = LearningRateScheduleCallback(
        1.0, multiplier=lambda epoch: (1.0, 0.0, 4.0)[round(3 * epoch)], staircase=False
    )
    _fit(model, [callback])
    assert _weight(model) == -5.0


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Muon])
def test_optimizers_whose_state_holds_no_rate_are_left_alone(optimizer):
    weights = []
    for momentum_correction in (True, False):
        model = _model(optimizer(1.0))
        _fit(model, [_doubling(momentum_correction)])
        weights.append(_weight(model))
    assert weights[0] == weights[1] != 0.0


def test_refuses_a_momentum_that_it_does_not_know():
    class HeavyBall(keras.optimizers.Adam):
        momentum = 0.9

    message = r"does not know how HeavyBall .* Pass momentum_correction=False"
    with pytest.raises(ValueError, match=message):
        _fit(_model(HeavyBall(0.1)), [LearningRateWarmupCallback(0.1)])
    _fit(_model(HeavyBall(0.1)), [LearningRateWarmupCallback(0.1, momentum_correction=False)])


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
        _fit(_model(keras.optimizers.SGD(learning_rate)), [callback])


def test_refuses_an_optimizer_of_several_rates():
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    model = _model(keras.optimizers.MultiOptimizer(optimizers))
    callback = LearningRateWarmupCallback(0.1)
    callback.set_model(model)
    with pytest.raises(ValueError, match="MultiOptimizer, which has one for each"):
        callback.on_train_begin()


def test_unknown_number_of_steps():
    def batches():
        for _ in range(4):
            yield np.ones([1, 1]), np.zeros([1, 1])

    model = _model(keras.optimizers.SGD(0.4))
    with pytest.raises(ValueError, match="Pass steps_per_epoch to it"):
        model.fit(batches(), callbacks=[LearningRateWarmupCallback(0.4)], verbose=0)
    with _FourReplicas("/CPU:0").scope():
        model = _model(keras.optimizers.SGD(0.4))
    rates = _Rates()
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
            "Received: start_epoch=3, end_epoch=3, which holds none",
        ),
        (lambda: BroadcastGlobalVariablesCallback("0"), "Received: root_rank='0'"),
    ],
)
def test_refuses_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_best_model_checkpoint_keeps_the_best(tmp_path):
    path = tmp_path / "best.keras"
    callback = BestModelCheckpoint(path, monitor="val_loss")
    assert isinstance(callback, keras.callbacks.ModelCheckpoint)
    model = _model(keras.optimizers.SGD(1.0))
    callback.set_model(model)
    for epoch, loss in enumerate([3.0, 1.0, 2.0]):
        model.set_weights([np.full([1, 1], float(epoch))])
        callback.on_epoch_end(epoch, {"val_loss": loss})
    assert _weight(keras.models.load_model(path, compile=False)) == 1.0


def test_without_an_engine_nothing_is_moved():
    model = _model(keras.optimizers.SGD(1.0))
    logs = {"loss": 2.0}
    for callback in (BroadcastGlobalVariablesCallback(5), MetricAverageCallback()):
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0}


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, engine="tensorflow") as pool:
        yield pool


def test_importing_needs_no_horovod_and_defines_no_flag(ranks):
    def imported():
        import sys

        from absl import flags

        before = set(flags.FLAGS)
        import tfdist.compat.horovod  # noqa: F401

        return "horovod" in sys.modules, set(flags.FLAGS) - before

    assert ranks.run(imported, timeout=120) == [(False, set())] * 2


def test_broadcast_gives_all_ranks_the_variables_of_the_root(ranks):
    def broadcast(root_rank):
        import types

        import keras
        import numpy as np

        import tfdist.testing
        from tfdist.compat.horovod import BroadcastGlobalVariablesCallback

        class Mixed(keras.layers.Layer):
            """Holds what layers hold besides float32."""

            def build(self, _):
                kinds = ["bool", "bfloat16", "float16", "float64"]
                kinds += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
                for dtype in kinds:
                    self.add_weight(shape=[3], dtype=dtype, trainable=False, name=dtype)
                self.add_weight(shape=[], dtype="int32", trainable=False, name="scalar")
                self.add_weight(shape=[0], dtype="float32", trainable=False, name="empty")

            def call(self, x):
                return x

        engine = tfdist.testing.engine()
        model = keras.Sequential(
            [
                keras.Input([2]),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=1),
                Mixed(),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=2)
        callback = BroadcastGlobalVariablesCallback(root_rank)
        callback.set_model(model)
        try:
            callback.on_train_begin()
        except ValueError as error:
            unbuilt = str(error)
        model.optimizer.build(model.trainable_variables)

        variables = [*model.variables, *model.optimizer.variables]

        def fill(value):
            for variable in variables:
                variable.assign(np.full(variable.shape, value).astype(variable.dtype))

        def values():
            return {v.path: np.asarray(v.value, dtype="float64").tolist() for v in variables}

        fill(engine.rank)
        callback.on_train_begin()
        first = values()
        fill(engine.rank + 5)
        callback.on_train_begin()
        return unbuilt, first, values(), {v.path: v.shape for v in variables}

    for root in (0, 1):
        for rank, (unbuilt, first, second, shapes) in enumerate(
            ranks.run(broadcast, root, timeout=120)
        ):
            assert "The optimizer has no variables to broadcast yet" in unbuilt
            # Dense 2, normalization 4, dropout's seed 1, Mixed 14; Adam: 2 + 2 for each of 4.
            assert len(shapes) == 21 + 10
            for path, shape in shapes.items():
                assert first[path] == np.full(shape, float(root)).tolist(), path
                again = 1.0 if path.endswith("bool") else rank + 5.0
                assert second[path] == np.full(shape, again).tolist(), path


def test_broadcast_leaves_the_slices_of_tensor_parallel_ranks(ranks):
    def broadcast():
        import types

        import keras
        import numpy as np

        import tfdist.testing
        from tfdist import Mesh
        from tfdist.compat.horovod import BroadcastGlobalVariablesCallback

        engine = tfdist.testing.engine(Mesh(tensor=2))
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        model.set_weights([np.full([1, 1], engine.rank)])
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=1)
        callback = BroadcastGlobalVariablesCallback(1)
        callback.set_model(model)
        callback.on_train_begin()
        return float(model.get_weights()[0][0, 0])

    assert ranks.run(broadcast, timeout=120) == [0.0, 1.0]


def test_broadcast_refuses_roots_and_split_variables(ranks):
    def refusals():
        import types

        import keras

        import tfdist.testing
        from tfdist.compat.horovod import BroadcastGlobalVariablesCallback

        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        messages = []
        for root, more in ((2, {}), (0, {"zero_stage": 1})):
            model._distribute_strategy = types.SimpleNamespace(
                engine=tfdist.testing.engine(), num_replicas_in_sync=2, **more
            )
            callback = BroadcastGlobalVariablesCallback(root)
            callback.set_model(model)
            try:
                callback.on_train_begin()
            except ValueError as error:
                messages.append(str(error))
        return messages

    for root, zero in ranks.run(refusals, timeout=120):
        assert "in [0, 2). Received: root_rank=2." in root
        assert "ZeRO stage 1 keeps different slices" in zero


def test_metrics_are_averaged_over_the_ranks(ranks):
    def average():
        import types

        import keras

        import tfdist.testing
        from tfdist.compat.horovod import MetricAverageCallback

        engine = tfdist.testing.engine()
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=2)
        callback = MetricAverageCallback()
        callback.set_model(model)
        logs = {"loss": 1.0 + engine.rank, "count": engine.rank, "note": "rank"}
        # The ranks' dicts are in other orders.
        logs = {"global": 1 / 3, "accuracy": 0.25 * engine.rank, **logs}
        if engine.rank:
            logs = dict(reversed(logs.items()))
        callback.on_epoch_end(0, logs)
        once = dict(logs)
        callback.on_epoch_end(1, logs)
        callback.on_epoch_end(2, None)
        return once, logs

    for rank, (once, twice) in enumerate(ranks.run(average, timeout=120)):
        assert once == {
            "accuracy": 0.125,
            "count": rank,
            "global": 1 / 3,
            "loss": 1.5,
            "note": "rank",
        }
        assert once == twice


def test_logs_of_different_keys_are_an_error_on_all_ranks(ranks):
    def mismatch():
        import types

        import keras

        import tfdist.testing
        from tfdist.compat.horovod import MetricAverageCallback

        engine = tfdist.testing.engine()
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=2)
        callback = MetricAverageCallback()
        callback.set_model(model)
        try:
            callback.on_epoch_end(0, {"loss": 1.0, **({"val_loss": 2.0} if engine.rank else {})})
        except ValueError as error:
            return str(error)

    first, second = ranks.run(mismatch, timeout=120)
    assert "on rank 0: ['loss']; other keys on ranks [1]" in first
    assert "on rank 1: ['loss', 'val_loss']; other keys on ranks [0]" in second
