"""What `fit` offers: forms of data, and steps and loops of ones own; each as a function of a strategy."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.strategies import programs
from tests.strategies.compile_programs import compiled, fit_images
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, mlp, scope, start

__all__ = [
    "batches_of_a_known_size_that_does_not_divide",
    "custom_train_step",
    "data_set_with_static_batches",
    "eager",
    "fit_twice",
    "generator",
    "on_batch_methods",
    "own_function",
    "py_dataset",
    "steps_per_execution",
    "validation_split",
]


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
