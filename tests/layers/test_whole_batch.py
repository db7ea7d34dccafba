"""What looks at a whole batch, or at how Keras builds a model: others' scripts, on uneven batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tests.strategies.programs import finish, scope, start

#: The last batch has one row: none for the ranks but the first.
ROWS, BATCH = 11, 5


def arrays(classes: int = 3):
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 6)).astype("float32"), random.integers(0, classes, ROWS)


def batches(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]).batch(BATCH)


def gathered(value, axis: int = 0):
    """The rows of the whole batch; without a strategy the batch is whole."""
    if not tf.distribute.has_strategy():
        return value
    return tf.distribute.get_strategy().gather(value, axis=axis)


def supervised_contrastive(labels, embeddings):
    """Khosla et al. 2020: each row is compared with all others of the batch."""
    labels = gathered(tf.reshape(labels, [-1]))
    embeddings = tf.transpose(gathered(tf.transpose(embeddings), axis=1))
    embeddings = tf.math.l2_normalize(embeddings, axis=1)
    similar = tf.linalg.matmul(embeddings, embeddings, transpose_b=True) / 0.5
    similar -= 1e9 * tf.eye(tf.shape(similar)[0])
    alike = tf.cast(labels[:, None] == labels[None], tf.float32)
    alike -= tf.eye(tf.shape(alike)[0])
    logs = tf.nn.log_softmax(similar) * alike
    return -tf.reduce_sum(logs) / tf.maximum(tf.reduce_sum(alike), 1.0)


def embedder():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


def contrastive_loss(strategy):
    start()
    x, y = arrays()
    with scope(strategy):
        model = embedder()
        model.compile(keras.optimizers.SGD(0.1), supervised_contrastive)
    return finish(model, model.fit(batches(x, y), epochs=2, verbose=0), x, y, batch_size=BATCH)


class Contrastive(keras.Model):
    """The same in a step of its own, by `tf.distribute`'s own name for it; without `call`."""

    def __init__(self):
        super().__init__()
        self.embedder = embedder()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            embeddings = self.embedder(x)
            context = tf.distribute.get_replica_context()
            if tf.distribute.has_strategy():
                y, embeddings = context.all_gather([y, embeddings], axis=0)
            loss = _plain_contrastive(y, embeddings)
        variables = self.embedder.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def _plain_contrastive(labels, embeddings):
    embeddings = tf.math.l2_normalize(embeddings, axis=1)
    similar = tf.linalg.matmul(embeddings, embeddings, transpose_b=True)
    alike = tf.cast(labels[:, None] == labels[None], tf.float32)
    return tf.reduce_mean(tf.square(similar - alike))


def contrastive_step(strategy):
    start()
    x, y = arrays()
    with scope(strategy):
        model = Contrastive()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(batches(x, y), epochs=2, verbose=0)
    weights = {f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.embedder.weights)}
    return programs.Result(weights, history.history, {}, [])


def ctc(strategy):
    """A loss whose operations do not stand tensors without rows."""
    start()
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 8, 3)).astype("float32")
    y = random.integers(1, 4, (ROWS, 3))
    with scope(strategy):
        model = keras.Sequential([keras.Input((8, 3)), keras.layers.Dense(5, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.CTC())
    return finish(model, model.fit(batches(x, y), epochs=2, verbose=0), x, y, batch_size=BATCH)


def metrics_that_need_rows(strategy):
    """A metric that looks for the largest entry, which no entry would be."""
    start()
    x, y = arrays()

    def hardest(y_true, y_pred):
        taken = tf.gather(y_pred, tf.cast(tf.reshape(y_true, [-1]), tf.int32), batch_dims=1)
        with tf.control_dependencies([tf.debugging.assert_greater(tf.size(taken), 0)]):
            return tf.identity(taken)

    with scope(strategy):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), programs.cross_entropy(), metrics=[hardest])
    return finish(model, model.fit(batches(x, y), epochs=2, verbose=0), x, y, batch_size=BATCH)


class Gan(keras.Model):
    """Two networks with an optimizer each, and no `call`."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.maker = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(6)]
        )
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        noise = data[:, :2]
        with tf.GradientTape(persistent=True) as tape:
            real, made = self.critic(data), self.critic(self.maker(noise))
            critic_loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(
                tf.nn.softplus(made)
            )
            maker_loss = tf.reduce_mean(tf.nn.softplus(-made))
        for loss, network, optimizer in (
            (critic_loss, self.critic, self.first),
            (maker_loss, self.maker, self.second),
        ):
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(critic_loss)
        return {"loss": self.tracker.result()}


def gan(strategy):
    start()
    x, _ = arrays()
    with scope(strategy):
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    history = model.fit(batches(x), epochs=2, verbose=0)
    weights = {f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.weights)}
    return programs.Result(weights, history.history, {}, [])


class Pairs(keras.Model):
    """Its batches are pairs of pairs, which `compile`'s loss knows nothing of."""

    def __init__(self):
        super().__init__()
        self.network = keras.layers.Dense(3)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        (x, y), (first, second) = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
            loss += tf.reduce_mean(tf.square(self(first) - self(second)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def data_of_a_form_of_its_own(strategy):
    start()
    x, y = arrays()
    with scope(strategy):
        model = Pairs()
        model.compile(keras.optimizers.SGD(0.1), programs.cross_entropy())
    data = tf.data.Dataset.from_tensor_slices(((x, y), (x + 1, x - 1))).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0)
    weights = {f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.weights)}
    return programs.Result(weights, history.history, {}, [])


class Squares(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def one_tuple(strategy):
    """`((a, b),)`: inputs without targets, as siamese networks take them."""
    start()
    x, _ = arrays()
    with scope(strategy):
        first, second = keras.Input((6,)), keras.Input((6,))
        shared = keras.layers.Dense(4)
        distance = keras.layers.Subtract()([shared(first), shared(second)])
        model = keras.Model([first, second], Squares()(distance))
        model.compile(keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices(((x, x[::-1].copy()),)).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0)
    weights = {f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.weights)}
    predicted = model.predict([x, x[::-1].copy()], batch_size=BATCH, verbose=0)
    return programs.Result(weights, history.history, {}, [predicted])


PROGRAMS = [
    contrastive_loss,
    contrastive_step,
    ctc,
    metrics_that_need_rows,
    gan,
    data_of_a_form_of_its_own,
    one_tuple,
]
QUICK = [contrastive_loss, gan, data_of_a_form_of_its_own, one_tuple]


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("program", slow_but(QUICK, PROGRAMS), ids=lambda p: p.__name__)
def test_as_in_one_process(pool, one_process, program):
    expected = programs.reference(one_process, program)
    programs.assert_same(pool.run(programs.on_rank, program, timeout=120), expected)


def group_of_a_value(strategy):
    a = tf.Variable(1.0)

    @tf.function
    def assign():
        with tf.control_dependencies([strategy.group(a.assign(2.0))]):
            return a.read_value()

    return float(assign()), strategy.group("data").size, strategy.group().size


@on_ranks(("tensorflow", 2))
def test_tensorflows_own_group(pool):
    assert pool.run(programs.on_rank, group_of_a_value) == [(2.0, 2, 2)] * 2
