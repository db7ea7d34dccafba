"""Inputs and outputs of other shapes: ragged, sparse, nested, generated, several at once."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start
from tests.strategies.programs import finish

__all__ = [
    "dictionary_in_and_out",
    "generator_of_tuples",
    "many_outputs",
    "masked_objects",
    "nested_structures",
    "preprocessing_in_the_model",
    "py_dataset_of_dicts",
    "py_dataset_with_workers",
    "ragged_rows",
    "sparse_rows",
    "subclass_with_own_logs",
]


def many_outputs(strategy, feed: Feed) -> Result:
    """A softmax, a sigmoid and a number, each with its loss, weight and metrics."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(8, activation="relu")(inputs)
        kind = layers.Dense(3, activation="softmax", name="kind")(x)
        flag = layers.Dense(1, activation="sigmoid", name="flag")(x)
        size = layers.Dense(1, name="size")(x)
        return keras.Model(inputs, {"kind": kind, "flag": flag, "size": size})

    random = rng()
    x = random.normal(size=(feed.rows, 6)).astype("float32")
    y = {
        "kind": random.integers(0, 3, feed.rows),
        "flag": random.integers(0, 2, (feed.rows, 1)).astype("float32"),
        "size": random.normal(size=(feed.rows, 1)).astype("float32"),
    }
    compiled = lambda: {  # noqa: E731
        "optimizer": adam(),
        "loss": {
            "kind": "sparse_categorical_crossentropy",
            "flag": "binary_crossentropy",
            "size": "mse",
        },
        "loss_weights": {"kind": 1.0, "flag": 0.5, "size": 0.25},
        "metrics": {"kind": ["accuracy"], "flag": ["accuracy"], "size": ["mae"]},
    }
    return run(strategy, feed, build, compiled, x, y)


def dictionary_in_and_out(strategy, feed: Feed) -> Result:
    """Issue tickets: title and body, priority and department."""

    def build():
        title, body = keras.Input((5,), name="title"), keras.Input((6,), name="body")
        tags = keras.Input((3,), name="tags")
        words = layers.Embedding(9, 3)
        x = layers.Concatenate()([layers.LSTM(3)(words(title)), layers.LSTM(4)(words(body)), tags])
        outputs = {
            "priority": layers.Dense(1, name="priority")(x),
            "department": layers.Dense(4, name="department")(x),
        }
        return keras.Model({"title": title, "body": body, "tags": tags}, outputs)

    random = rng()
    x = {
        "title": random.integers(0, 9, (feed.rows, 5)),
        "body": random.integers(0, 9, (feed.rows, 6)),
        "tags": random.integers(0, 2, (feed.rows, 3)).astype("float32"),
    }
    y = {
        "priority": random.integers(0, 2, (feed.rows, 1)).astype("float32"),
        "department": np.eye(4, dtype="float32")[random.integers(0, 4, feed.rows)],
    }
    compiled = lambda: {  # noqa: E731
        "optimizer": keras.optimizers.RMSprop(1e-3),
        "loss": {
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        "loss_weights": {"priority": 1.0, "department": 0.2},
    }
    return run(strategy, feed, build, compiled, x, y)


class Nested(keras.Model):
    """A tuple in a dict in, a dict of two out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(3), layers.Dense(3)

    def call(self, inputs):
        left, right = inputs["pair"]
        x = self.first(left) + self.second(right) + inputs["bias"]
        return {"sum": x, "square": ops.square(x)}


def nested_structures(strategy, feed: Feed) -> Result:
    random = rng()
    left, right, bias = (random.normal(size=(feed.rows, 3)).astype("float32") for _ in range(3))
    x, y = {"pair": (left, right), "bias": bias}, {"sum": left, "square": right}
    compiled = lambda: {"optimizer": sgd(), "loss": {"sum": "mse", "square": "mae"}}  # noqa: E731
    return run(strategy, feed, Nested, compiled, x, y)


class OfRagged(keras.Model):
    """Takes ragged tensors as they are, and pools them itself."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4)
        self.head = layers.Dense(1, activation="sigmoid")

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            mask = tf.ones_like(x, tf.float32).to_tensor()[..., None]
            x = x.to_tensor()
        else:
            mask = tf.cast(x > 0, tf.float32)[..., None]
        words = tf.reduce_sum(self.table(x) * mask, axis=1)
        return self.head(tf.math.divide_no_nan(words, tf.reduce_sum(mask, axis=1)))


def ragged_rows(strategy, feed: Feed) -> Result:
    """Sentences of their own lengths: ragged up to the model, or made dense in the data set."""
    start()
    random = rng()
    rows = [list(random.integers(1, 9, random.integers(1, 6))) for _ in range(feed.rows)]
    y = random.integers(0, 2, (feed.rows, 1)).astype("float32")
    order = feed.arranged(np.arange(feed.rows))
    ragged = tf.ragged.constant([rows[i] for i in order], dtype=tf.int32)
    with scope(strategy):
        model = OfRagged()
        model.build((None, None))
        model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((ragged, y[order])).batch(feed.batch)
    if feed.kind == "data":
        data = data.map(lambda x, y: (x.to_tensor(), y))
    history = model.fit(data, epochs=2, verbose=0)
    evaluation = model.evaluate(data, verbose=0, return_dict=True)
    predictions = [model.predict(data, verbose=0)]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, evaluation, predictions)


def sparse_rows(strategy, feed: Feed) -> Result:
    """A bag of words as a `tf.SparseTensor`, into a dense layer."""
    start()
    random = rng()
    x = (random.uniform(size=(feed.rows, 20)) < 0.1).astype("float32")
    x[:, 0] = 1
    x, y = feed.arranged((x, random.integers(0, 3, feed.rows)))
    with scope(strategy):
        inputs = keras.Input((20,), sparse=True)
        model = keras.Model(inputs, layers.Dense(3)(layers.Dense(5, activation="tanh")(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss, metrics=["accuracy"])
    sparse = tf.sparse.from_dense(x)
    data = tf.data.Dataset.from_tensor_slices((sparse, y)).batch(feed.batch)
    history = model.fit(data, epochs=2, verbose=0)
    evaluation = model.evaluate(data, verbose=0, return_dict=True)
    predictions = [model.predict(data, verbose=0)]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, evaluation, predictions)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch, **options):
        super().__init__(**options)
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return -(-len(self.y) // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return tf.nest.map_structure(lambda part: part[rows], (self.x, self.y))


def points(feed: Feed):
    random = rng()
    x = random.normal(size=(feed.rows, 5)).astype("float32")
    return feed.arranged((x, random.integers(0, 3, feed.rows)))


def classifier(outputs: str = "softmax"):
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, activation="relu"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3, activation=outputs),
        ]
    )


def py_dataset_with_workers(strategy, feed: Feed) -> Result:
    """Threads may answer in another order, but Keras hands the batches on in theirs."""
    start()
    x, y = points(feed)
    with scope(strategy):
        model = classifier()
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = Batches(x, y, feed.batch, workers=2, use_multiprocessing=False, max_queue_size=3)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False, validation_data=data)
    return finish(model, history, x, y, batch_size=4)


def py_dataset_of_dicts(strategy, feed: Feed) -> Result:
    """A dict of inputs, with sample weights as third."""
    start()
    x, y = points(feed)
    with scope(strategy):
        inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((5,), name="b")}
        x_ = layers.Dense(4)(layers.Multiply()([inputs["a"], inputs["b"]]))
        model = keras.Model(inputs, layers.Dense(3)(x_))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(), loss, weighted_metrics=["accuracy"])
    data = Batches({"a": x, "b": x[:, ::-1].copy()}, y, feed.batch)
    history = model.fit(
        data, epochs=2, verbose=0, shuffle=False, class_weight={0: 1.0, 1: 2.0, 2: 0.5}
    )
    return finish(model, history, {"a": x, "b": x[:, ::-1].copy()}, y, batch_size=4)


def generator_of_tuples(strategy, feed: Feed) -> Result:
    """An endless generator with steps per epoch."""
    start()
    x, y = points(feed)
    batches = Batches(x, y, feed.batch)

    def endless():
        while True:
            for index in range(len(batches)):
                yield batches[index]

    with scope(strategy):
        model = classifier()
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        endless(),
        steps_per_epoch=len(batches),
        epochs=2,
        verbose=0,
        validation_data=batches,
    )
    return finish(model, history, x, y, batch_size=4)


def masked_objects(strategy, feed: Feed) -> Result:
    """Points of objects, a class each, `Masking`, sample weights for each entry."""

    def build():
        inputs = keras.Input((4, 3))
        x = layers.Masking()(inputs)
        x = layers.SimpleRNN(5, return_sequences=True)(x)
        return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))

    random = rng()
    x = random.normal(size=(feed.rows, 4, 3)).astype("float32")
    x[np.arange(4) >= random.integers(1, 5, feed.rows)[:, None]] = 0
    y = random.integers(0, 3, (feed.rows, 4))
    weights = random.uniform(0, 2, (feed.rows, 4)).astype("float32")
    compiled = lambda: {  # noqa: E731
        "optimizer": sgd(),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "weighted_metrics": ["accuracy"],
    }
    return run(strategy, feed, build, compiled, x, y, weights)


def preprocessing_in_the_model(strategy, feed: Feed) -> Result:
    """Adapted normalization, lookups and bins in the model: integers and strings as columns."""
    start()
    random = rng()
    numbers = random.normal(3, 2, (feed.rows, 1)).astype("float32")
    words = random.choice(["red", "green", "blue", "none"], (feed.rows, 1)).astype(object)
    y = random.integers(0, 2, (feed.rows, 1)).astype("float32")
    numbers, words, y = feed.arranged((numbers, words, y))
    with scope(strategy):
        normalize = layers.Normalization()
        normalize.adapt(np.sort(numbers, axis=0))
        look_up = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
        bins = layers.Discretization(bin_boundaries=[1.0, 3.0, 5.0], output_mode="one_hot")
        inputs = {
            "number": keras.Input((1,), name="number"),
            "word": keras.Input((4,), name="word"),
        }
        x = layers.Concatenate()(
            [normalize(inputs["number"]), bins(inputs["number"]), inputs["word"]]
        )
        model = keras.Model(
            inputs, layers.Dense(1, activation="sigmoid")(layers.Dense(4, "tanh")(x))
        )
        model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(({"number": numbers, "word": words}, y))
    data = data.batch(feed.batch).map(
        lambda x, y: ({"number": x["number"], "word": look_up(x["word"])}, y)
    )
    history = model.fit(data, epochs=2, verbose=0)
    evaluation = model.evaluate(data, verbose=0, return_dict=True)
    predictions = [model.predict(data, verbose=0)]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, evaluation, predictions)


class OwnLogs(keras.Model):
    """A step that returns a dict of its own: a metric, a loss and a norm of weights."""

    def __init__(self):
        super().__init__()
        self.network = classifier()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        self.accuracy.update_state(y, y_pred)
        size = ops.sum(ops.square(self.network.layers[0].kernel))
        return {"own/loss": loss, "own/accuracy": self.accuracy.result(), "own/size": size}

    @property
    def metrics(self):
        return [self.accuracy]


def subclass_with_own_logs(strategy, feed: Feed) -> Result:
    random = rng()
    x = random.normal(size=(feed.rows, 5)).astype("float32")
    y = random.integers(0, 3, feed.rows)
    compiled = lambda: {"optimizer": adam(), "loss": "sparse_categorical_crossentropy"}  # noqa: E731
    start()
    with scope(strategy):
        model = OwnLogs()
        model.compile(**compiled())
    history = feed.fit(model, x, y)
    predictions = [model.predict(x, batch_size=4, verbose=0)]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, {}, predictions)
