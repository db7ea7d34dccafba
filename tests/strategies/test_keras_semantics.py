"""What `compile` and `fit` offer, each against plain Keras in one process on uneven batches."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, mlp, scope, start


def fit_images(strategy, model_of, compile_of, *, data=None, epochs=2, evaluate=None, **fit):
    """Compiles and trains on the uneven images; `data` turns arrays into what `fit` is given."""
    start()
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = model_of()
        model.compile(**compile_of())
    given = {"x": x, "y": y, "batch_size": BATCH} if data is None else {"x": data(x, y)}
    history = model.fit(**given, epochs=epochs, verbose=0, **fit)
    return finish(model, history, x, y, **(evaluate or {}))


def compiled(optimizer=None, loss=None, **options):
    return {
        "optimizer": optimizer or programs.optimizer("sgd"),
        "loss": loss or programs.cross_entropy(),
        **options,
    }


def clip_by_norm(strategy):
    optimizer = lambda: programs.optimizer("sgd", clipnorm=0.05)  # noqa: E731
    return fit_images(strategy, mlp, lambda: compiled(optimizer()))


def clip_by_global_norm(strategy):
    return fit_images(
        strategy, mlp, lambda: compiled(programs.optimizer("sgd", global_clipnorm=0.1))
    )


def clip_by_value(strategy):
    return fit_images(strategy, mlp, lambda: compiled(programs.optimizer("sgd", clipvalue=0.01)))


def gradient_accumulation(strategy):
    options = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    return fit_images(strategy, mlp, lambda: compiled(programs.optimizer("sgd", **options)))


def moving_average_of_weights(strategy):
    options = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3}
    return fit_images(
        strategy, mlp, lambda: compiled(programs.optimizer("sgd", weight_decay=0.05, **options))
    )


def regularizers(strategy):
    def model():
        return keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(
                    8,
                    "tanh",
                    kernel_regularizer="l2",
                    activity_regularizer=keras.regularizers.L2(0.1),
                ),
                keras.layers.Dense(4),
            ]
        )

    return fit_images(strategy, model, compiled)


def sample_weights(strategy):
    weights = np.random.default_rng(3).uniform(0, 2, UNEVEN_ROWS).astype("float32")
    return fit_images(
        strategy,
        mlp,
        lambda: compiled(weighted_metrics=["accuracy"], metrics=["accuracy"]),
        sample_weight=weights,
        evaluate={"sample_weight": weights},
    )


def loss_over_sum_of_weights(strategy):
    weights = np.random.default_rng(3).uniform(0, 2, UNEVEN_ROWS).astype("float32")
    loss = functools.partial(programs.cross_entropy, reduction="mean_with_sample_weight")
    return fit_images(strategy, mlp, lambda: compiled(loss=loss()), sample_weight=weights)


def loss_summed_over_batch(strategy):
    optimizer = lambda: keras.optimizers.SGD(0.002, momentum=0.9)  # noqa: E731
    return fit_images(
        strategy, mlp, lambda: compiled(optimizer(), programs.cross_entropy(reduction="sum"))
    )


def loss_of_each_sample(strategy):
    # Also an optimizer that was made outside of the scope.
    rate = keras.optimizers.SGD(0.002, momentum=0.9)
    loss = programs.cross_entropy(reduction=None)
    return fit_images(strategy, mlp, lambda: compiled(rate, loss))


def batches_of_a_known_size_that_does_not_divide(strategy):
    return fit_images(
        strategy,
        mlp,
        lambda: compiled(metrics=["accuracy"]),
        data=lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(10, drop_remainder=True),
    )


def own_function(strategy):
    """A loop of the user's own, by tf.distribute's contract: losses scaled by the global batch."""
    start()
    x, y = images(48)
    with scope(strategy):
        model = mlp()
        optimizer = programs.optimizer("sgd")
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(labels, model(images))) / 12
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    losses = []
    if strategy is None:
        losses = [float(step(batch)) for batch in data]
    else:
        whole_step = tf.function(lambda batch: strategy.run(step, args=(batch,)))
        for batch in strategy.experimental_distribute_dataset(data):
            losses.append(float(strategy.reduce("SUM", whole_step(batch), axis=None)))
    return programs.Result(
        {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)},
        {"loss": losses},
        {},
        [],
    )


def class_weights(strategy):
    return fit_images(strategy, mlp, compiled, class_weight={0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0})


def masks(strategy):
    """Sequences of different lengths: a mean over the entries that are not padding."""
    return fit_sequences(strategy)


def clip_sparse_gradients(strategy):
    """Keras takes the norm of an embedding's gradient over its rows, an id that comes twice twice."""
    return fit_sequences(strategy, global_clipnorm=0.05)


def fit_sequences(strategy, **options):
    start()
    random = np.random.default_rng(0)
    tokens = random.integers(1, 9, (UNEVEN_ROWS, 7))
    tokens[np.arange(7) >= random.integers(1, 8, UNEVEN_ROWS)[:, None]] = 0
    targets = random.integers(0, 5, (UNEVEN_ROWS, 7))
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Embedding(9, 6, mask_zero=True),
                keras.layers.LSTM(5, return_sequences=True),
                keras.layers.Dense(5),
            ]
        )
        model.compile(**compiled(programs.optimizer("sgd", **options), metrics=["accuracy"]))
    history = model.fit(tokens, targets, batch_size=BATCH, epochs=2, verbose=0)
    return finish(model, history, tokens, targets)


class CustomStep(keras.Model):
    """The train step of Keras' guide, with a loss of its own and a value that no metric holds."""

    def __init__(self):
        super().__init__()
        self.network = mlp()
        self.tracker = keras.metrics.Mean(name="squares")

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            squares = keras.ops.mean(
                keras.ops.square(self(x) - keras.ops.one_hot(y, 4, dtype="float32"))
            )
        gradients = tape.gradient(squares, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(squares)
        return {"squares": self.tracker.result(), "last": squares}

    def test_step(self, data):
        x, y = data
        return {
            "right": keras.ops.mean(
                keras.ops.cast(
                    keras.ops.argmax(self(x), axis=-1) == keras.ops.cast(y, "int32"), "float32"
                )
            )
        }

    @property
    def metrics(self):
        return [self.tracker]


def custom_train_step(strategy):
    return fit_images(strategy, CustomStep, lambda: {"optimizer": programs.optimizer("sgd")})


def eager(strategy):
    return fit_images(
        strategy, mlp, lambda: compiled(run_eagerly=True, metrics=["accuracy"]), epochs=1
    )


def steps_per_execution(strategy):
    return fit_images(
        strategy,
        programs.convnet,
        lambda: compiled(steps_per_execution=3, metrics=["accuracy"]),
        data=lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
    )


def data_set_with_static_batches(strategy):
    return fit_images(
        strategy,
        mlp,
        lambda: compiled(metrics=["accuracy"]),
        data=lambda x, y: (
            tf.data.Dataset.from_tensor_slices((x, y))
            .shuffle(UNEVEN_ROWS)
            .batch(BATCH, drop_remainder=True)
        ),
    )


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def py_dataset(strategy):
    return fit_images(strategy, mlp, compiled, data=Rows)


def generator(strategy):
    def batches(x, y):
        while True:
            yield from (Rows(x, y)[i] for i in range(len(Rows(x, y))))

    return fit_images(strategy, mlp, compiled, data=batches, steps_per_epoch=5)


def validation_split(strategy):
    return fit_images(strategy, mlp, lambda: compiled(metrics=["accuracy"]), validation_split=0.3)


def metrics_of_many_states(strategy):
    def binary(x, y):
        return tf.data.Dataset.from_tensor_slices((x, (y > 1).astype("float32"))).batch(BATCH)

    def model():
        return keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )

    metrics = ["AUC", "Precision", "Recall", "TruePositives", "binary_accuracy"]
    result = fit_images(
        strategy,
        model,
        lambda: {
            "optimizer": programs.optimizer("sgd"),
            "loss": "binary_crossentropy",
            "metrics": metrics,
        },
        data=binary,
        evaluate={},
    )
    return result


def on_batch_methods(strategy):
    start()
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = mlp()
        model.compile(**compiled(metrics=["accuracy"]))
    logs = [
        model.train_on_batch(x[:12], y[:12], return_dict=True),
        model.train_on_batch(x[12:19], y[12:19], return_dict=True),
        model.test_on_batch(x[:24], y[:24], return_dict=True),
    ]
    predicted = model.predict_on_batch(x[:7])
    result = finish(model, None, x, y)
    result.history = {f"{i}-{k}": [float(v)] for i, log in enumerate(logs) for k, v in log.items()}
    result.predictions.append(predicted)
    return result


def frozen_layers(strategy):
    def model():
        model = mlp()
        model.layers[1].trainable = False
        return model

    return fit_images(strategy, model, compiled)


def fit_twice(strategy):
    """The second `fit` goes on with the optimizer as the first left it."""
    start()
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = mlp()
        model.compile(programs.optimizer("adamw"), programs.cross_entropy())
    for _ in range(2):
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    return finish(model, history, x, y)


PROGRAMS = [
    clip_by_norm,
    clip_by_global_norm,
    clip_by_value,
    gradient_accumulation,
    moving_average_of_weights,
    regularizers,
    sample_weights,
    loss_over_sum_of_weights,
    loss_summed_over_batch,
    loss_of_each_sample,
    batches_of_a_known_size_that_does_not_divide,
    own_function,
    class_weights,
    masks,
    clip_sparse_gradients,
    custom_train_step,
    eager,
    steps_per_execution,
    data_set_with_static_batches,
    py_dataset,
    generator,
    validation_split,
    metrics_of_many_states,
    on_batch_methods,
    frozen_layers,
    fit_twice,
]

#: Each in another part of the step: gradients, weights of samples, masks, sparse rows, the loop.
QUICK = [
    clip_by_global_norm,
    gradient_accumulation,
    sample_weights,
    masks,
    clip_sparse_gradients,
    py_dataset,
]


@functools.cache
def reference(one_process, program):
    return one_process.run(programs.in_one_process, program)[0]


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("program", slow_but(QUICK, PROGRAMS), ids=lambda p: p.__name__)
def test_as_in_one_process(pool, one_process, program):
    expected = reference(one_process, program)
    programs.assert_same(pool.run(programs.on_rank, program, timeout=120), expected)


def overflow_on_one_rank(strategy):
    """Under float16 with a loss scale, a gradient that overflows on one rank only."""
    start()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = images(24)
        x[8] = np.inf  # In the second half of the first batch: the second rank's rows.
        with scope(strategy):
            model = mlp()
            model.compile(programs.optimizer("sgd"), programs.cross_entropy())
        model.fit(x, y, batch_size=12, epochs=3, verbose=0, shuffle=False)
    finally:
        keras.config.set_dtype_policy("float32")
    scale = model.optimizer
    return float(scale.dynamic_scale), int(scale.iterations), [w.numpy() for w in model.weights]


@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_one_rank_that_overflows_skips_the_step_everywhere(pool, one_process):
    expected = one_process.run(programs.in_one_process, overflow_on_one_rank)[0]
    results = pool.run(programs.on_rank, overflow_on_one_rank)
    assert expected[0] < 2.0**15, "the planned overflow did not happen"
    for scale, iterations, weights in results:
        assert (scale, iterations) == expected[:2]
        for got, right in zip(weights, expected[2], strict=True):
            np.testing.assert_allclose(got, right, atol=2e-3)


def compiled_by_xla(strategy):
    fit_images(strategy, mlp, lambda: compiled(jit_compile=True))


@on_ranks(("tensorflow", 2))
def test_xla_is_refused_in_one_line(pool):
    with pytest.raises(ValueError, match="jit_compile=True"):
        pool.run(programs.on_rank, compiled_by_xla)


class StopOnChief(keras.callbacks.Callback):
    def __init__(self, is_chief):
        super().__init__()
        self._is_chief = is_chief

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self._is_chief and epoch == 1


def stop_on_one_rank(strategy):
    x, y = images(UNEVEN_ROWS)
    with strategy.scope():
        model = mlp()
        model.compile(**compiled())
    callbacks = [StopOnChief(strategy.is_chief)]
    return len(model.fit(x, y, epochs=5, verbose=0, callbacks=callbacks).epoch)


@on_ranks(("tensorflow", 2))
def test_one_rank_that_stops_stops_all(pool):
    assert pool.run(programs.on_rank, stop_on_one_rank) == [2, 2]
