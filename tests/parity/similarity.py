"""Models that compare: siamese networks, contrastive losses, recommenders, a teacher and a student."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start

__all__ = [
    "collaborative_filtering",
    "distillation",
    "factorization_by_adam",
    "siamese_pairs",
    "siamese_triplets",
    "supervised_contrastive",
    "two_towers",
    "wide_and_deep",
]


def tower():
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def images(rows: int, how_many: int = 2):
    random = rng()
    return tuple(random.normal(size=(rows, 6, 6, 1)).astype("float32") for _ in range(how_many))


def contrastive_loss(margin: float):
    def loss(y_true, y_pred):
        y_true = ops.cast(y_true, y_pred.dtype)
        near, far = ops.square(y_pred), ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * near + y_true * far)

    return loss


def siamese_pairs(strategy, feed: Feed) -> Result:
    """`((left, right), y)` with a distance in a Lambda layer, and the margin loss of the example."""

    def build():
        left, right = keras.Input((6, 6, 1)), keras.Input((6, 6, 1))
        shared = tower()
        distance = layers.Lambda(
            lambda pair: ops.sqrt(
                ops.maximum(ops.sum(ops.square(pair[0] - pair[1]), 1, keepdims=True), 1e-7)
            ),
            output_shape=(1,),
        )([shared(left), shared(right)])
        x = layers.BatchNormalization(synchronized=True)(distance)
        return keras.Model([left, right], layers.Dense(1, activation="sigmoid")(x))

    y = rng().integers(0, 2, (feed.rows, 1)).astype("float32")
    compiled = lambda: {"optimizer": sgd(), "loss": contrastive_loss(1), "metrics": ["accuracy"]}  # noqa: E731
    return run(strategy, feed, build, compiled, images(feed.rows), y)


class Triplets(keras.Model):
    """The siamese network of the examples: three pictures, no target, its own steps."""

    def __init__(self):
        super().__init__()
        self.tower = tower()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = (self.tower(part) for part in inputs)
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )

    def loss_of(self, data):
        near, far = self(data)
        return ops.mean(ops.maximum(near - far + 0.5, 0.0))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.tower.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.loss_of(data))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


class NestedTriplets(Triplets):
    """The same where a batch is `((anchor, positive, negative),)`, as Keras makes it of a tuple x."""

    def train_step(self, data):
        return super().train_step(data[0])

    def test_step(self, data):
        return super().test_step(data[0])


def siamese_triplets(strategy, feed: Feed) -> Result:
    """From NumPy a batch has one level more than from a data set of triplets."""
    start()
    x = images(feed.rows, 3)
    with scope(strategy):
        model = NestedTriplets()
        model.compile(optimizer=adam())
    history = feed.fit(model, x)
    evaluation = model.evaluate(feed.batches(x), verbose=0, return_dict=True)
    predictions = model.predict(x, batch_size=4, verbose=0)
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, evaluation, list(predictions))


def anchors_and_others(projections, labels):
    """The supervised contrastive loss of a batch: each row against all others."""
    z = projections / ops.sqrt(ops.sum(ops.square(projections), axis=1, keepdims=True) + 1e-6)
    logits = ops.matmul(z, ops.transpose(z)) / 0.5
    others = 1.0 - ops.eye(ops.shape(z)[0])
    same = ops.cast(labels[:, None] == labels[None, :], "float32") * others
    logs = logits - ops.log(ops.sum(ops.exp(logits) * others, axis=1, keepdims=True) + 1e-6)
    return -ops.mean(ops.sum(same * logs, axis=1) / ops.maximum(ops.sum(same, axis=1), 1.0))


class Contrastive(keras.Model):
    """A loss that mixes rows sees the whole batch: what all ranks projected is gathered."""

    def __init__(self):
        super().__init__()
        self.tower = tower()

    def call(self, x):
        return self.tower(x)

    def train_step(self, data):
        x, y = data
        replica = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            everyone = replica.all_gather(self(x, training=True), axis=0)
            labels = replica.all_gather(y, axis=0)
            loss = anchors_and_others(everyone, labels)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def supervised_contrastive(strategy, feed: Feed) -> Result:
    start()
    (x,), y = images(feed.rows, 1), rng().integers(0, 2, feed.rows)
    with scope(strategy):
        model = Contrastive()
        model.compile(optimizer=sgd())
    history = feed.fit(model, x, y)
    predictions = [model.predict(x, batch_size=4, verbose=0)]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, {}, predictions)


class Recommender(keras.Model):
    """The matrix factorization of the examples: two tables, two biases, one dot product."""

    def __init__(self, users: int, films: int):
        super().__init__()
        normal = keras.initializers.HeNormal(seed=3)
        rule = keras.regularizers.l2(1e-3)
        self.user = layers.Embedding(
            users, 4, embeddings_initializer=normal, embeddings_regularizer=rule
        )
        self.user_bias = layers.Embedding(users, 1)
        self.film = layers.Embedding(
            films, 4, embeddings_initializer=normal, embeddings_regularizer=rule
        )
        self.film_bias = layers.Embedding(films, 1)

    def call(self, inputs):
        user, film = inputs[:, 0], inputs[:, 1]
        product = ops.sum(self.user(user) * self.film(film), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.film_bias(film))


def ratings(rows: int, users: int, films: int):
    random = rng()
    x = np.stack([random.integers(0, users, rows), random.integers(0, films, rows)], 1)
    return x, random.uniform(size=rows).astype("float32")


def collaborative_filtering(strategy, feed: Feed) -> Result:
    x, y = ratings(feed.rows, 5, 50)
    compiled = lambda: {"optimizer": adam(), "loss": keras.losses.BinaryCrossentropy()}  # noqa: E731
    return run(strategy, feed, lambda: Recommender(5, 50), compiled, x, y)


def factorization_by_adam(strategy, feed: Feed) -> Result:
    """Tables alone: their gradients are rows, and Adam's moments of other rows stay."""

    def build():
        user, film = keras.Input((1,), name="user"), keras.Input((1,), name="film")
        product = layers.Dot(axes=-1)([layers.Embedding(4, 3)(user), layers.Embedding(40, 3)(film)])
        return keras.Model({"user": user, "film": film}, layers.Flatten()(product))

    x, y = ratings(feed.rows, 4, 40)
    given = {"user": x[:, :1], "film": x[:, 1:]}
    compiled = lambda: {"optimizer": adam(), "loss": "mse"}  # noqa: E731
    return run(strategy, feed, build, compiled, given, y)


class TwoTowers(keras.Model):
    """Retrieval: all films of the table are candidates, so that no row looks at another."""

    def __init__(self):
        super().__init__()
        self.query = keras.Sequential([layers.Embedding(6, 4), layers.Dense(4, "tanh")])
        self.candidate = keras.Sequential([layers.Embedding(9, 4), layers.Dense(4)])
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, inputs):
        return ops.matmul(self.query(inputs), ops.transpose(self.candidate(ops.arange(9))))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_fn(y, y_pred, sample_weight)


def two_towers(strategy, feed: Feed) -> Result:
    x, _ = ratings(feed.rows, 6, 9)
    compiled = lambda: {  # noqa: E731
        "optimizer": sgd(),
        "loss": None,
        "metrics": [keras.metrics.SparseTopKCategoricalAccuracy(k=3)],
    }
    return run(strategy, feed, TwoTowers, compiled, x[:, 0], x[:, 1])


def wide_and_deep(strategy, feed: Feed) -> Result:
    """Numbers, categories and crosses of both, as a dict of columns."""

    def build():
        inputs = {
            "age": keras.Input((1,), name="age"),
            "kind": keras.Input((1,), name="kind", dtype="int32"),
            "town": keras.Input((1,), name="town", dtype="int32"),
        }
        one_hot = layers.CategoryEncoding(4, output_mode="one_hot")(inputs["kind"])
        crossed = layers.HashedCrossing(8, output_mode="one_hot")((inputs["kind"], inputs["town"]))
        wide = layers.Concatenate()([one_hot, crossed])
        town = layers.Flatten()(layers.Embedding(7, 3)(inputs["town"]))
        deep = layers.Concatenate()(
            [layers.BatchNormalization(synchronized=True)(inputs["age"]), town]
        )
        deep = layers.Dense(6, activation="relu")(deep)
        merged = layers.Concatenate()([wide, deep])
        return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(merged))

    random = rng()
    x = {
        "age": random.uniform(0, 9, (feed.rows, 1)).astype("float32"),
        "kind": random.integers(0, 4, (feed.rows, 1)).astype("int32"),
        "town": random.integers(0, 7, (feed.rows, 1)).astype("int32"),
    }
    y = random.integers(0, 2, (feed.rows, 1)).astype("float32")
    compiled = lambda: {  # noqa: E731
        "optimizer": sgd(),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy", keras.metrics.AUC(num_thresholds=11)],
    }
    return run(strategy, feed, build, compiled, x, y)


class Distiller(keras.Model):
    """The distiller of the examples: the teacher's softened answers beside the labels."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, *, distillation_loss_fn, alpha, temperature, **options):
        super().compile(**options)
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = self.teacher(x, training=False)
        plain = super().compute_loss(x, y, y_pred, sample_weight)
        softened = self.distillation_loss_fn(
            ops.softmax(teacher / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        return self.alpha * plain + (1 - self.alpha) * softened * self.temperature**2

    def call(self, x):
        return self.student(x)


def distillation(strategy, feed: Feed) -> Result:
    def build():
        return Distiller(tower(), tower())

    (x,), y = images(feed.rows, 1), rng().integers(0, 4, feed.rows)
    compiled = lambda: {  # noqa: E731
        "optimizer": adam(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": [keras.metrics.SparseCategoricalAccuracy()],
        "distillation_loss_fn": keras.losses.KLDivergence(),
        "alpha": 0.1,
        "temperature": 10,
    }
    return run(strategy, feed, build, compiled, x, y)
