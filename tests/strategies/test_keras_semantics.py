"""What `compile` and `fit` offer, each against plain Keras in one process on uneven batches."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks
from tests.strategies import programs
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, mlp, scope, start

KINDS = [("horovod", 3), ("tensorflow", 2)]


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


def class_weights(strategy):
    return fit_images(strategy, mlp, compiled, class_weight={0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0})


def masks(strategy):
    """Sequences of different lengths: a mean over the entries that are not padding."""
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
        model.compile(**compiled(metrics=["accuracy"]))
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
    class_weights,
    masks,
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
]


@functools.cache
def reference(one_process, program):
    return one_process.run(programs.in_one_process, program)[0]


@on_ranks(*KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_one_process(pool, one_process, program):
    expected = reference(one_process, program)
    programs.assert_same(pool.run(programs.on_rank, program, timeout=120), expected)
