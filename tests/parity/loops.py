"""Loops of the user's own: batches by hand, `strategy.run`, accumulated gradients, two datasets."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start

__all__ = [
    "accumulated_by_keras",
    "adversarial_regularization",
    "batches_by_hand",
    "consistency_of_two_inputs",
    "custom_loop",
    "custom_loop_with_metrics",
    "mean_teacher",
    "policy_gradient",
    "replay_by_hand",
    "second_derivatives",
]


def network():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)]
    )


def points(feed: Feed):
    random = rng()
    x = random.normal(size=(feed.rows, 5)).astype("float32")
    return x, random.integers(0, 3, feed.rows)


def weights_of(model) -> dict:
    return {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def batches_by_hand(strategy, feed: Feed) -> Result:
    """`train_on_batch` with metrics that are reset by hand, and `test_on_batch` in between."""
    start()
    x, y = feed.arranged(points(feed))
    with scope(strategy):
        model = network()
        model.compile(sgd(), cross_entropy(), metrics=["accuracy"])
    logs: dict[str, list] = {}
    for epoch in range(2):
        for i in range(0, feed.rows, feed.batch):
            rows = slice(i, i + feed.batch)
            shown = model.train_on_batch(x[rows], y[rows], return_dict=True)
            for name, value in shown.items():
                logs.setdefault(name, []).append(float(value))
        model.reset_metrics()
        measured = model.test_on_batch(x[:7], y[:7], return_dict=True)
        logs.setdefault(f"test_{epoch}", []).append(float(measured["loss"]))
        model.reset_metrics()
    return Result(weights_of(model), logs, {}, [model.predict_on_batch(x[:5])])


def custom_loop(strategy, feed: Feed) -> Result:
    """The loop of the guide: scaled losses, a distributed data set, `strategy.reduce`."""
    start()
    with scope(strategy):
        model = network()
        optimizer = adam()
        optimizer.build(model.trainable_variables)
        loss_of = cross_entropy(reduction=None)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / feed.batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = feed.batches(*points(feed))
    losses = []
    if strategy is None:
        for _ in range(2):
            losses += [float(step(batch)) for batch in data]
    else:

        @tf.function
        def whole(batch):
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        distributed = strategy.experimental_distribute_dataset(data)
        for _ in range(2):
            losses += [float(whole(batch)) for batch in distributed]
    return Result(weights_of(model), {"loss": losses}, {}, [])


def custom_loop_with_metrics(strategy, feed: Feed) -> Result:
    """An iterator inside of a `tf.function`, and sums of rows over the ranks in place of metrics."""
    start()
    with scope(strategy):
        model = network()
        optimizer = sgd()
        optimizer.build(model.trainable_variables)
    loss_of = cross_entropy(reduction="sum")

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits) / feed.batch
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        right = tf.reduce_sum(tf.cast(tf.argmax(logits, -1) == tf.cast(y, tf.int64), tf.float32))
        return loss, right, tf.cast(tf.shape(x)[0], tf.float32)

    data = feed.batches(*points(feed))
    seen = []
    if strategy is None:
        for x, y in data:
            seen.append([float(value) for value in step(x, y)])
    else:

        @tf.function
        def whole(iterator):
            values = strategy.run(step, args=next(iterator))
            return [strategy.reduce("SUM", value, axis=None) for value in values]

        iterator = iter(strategy.experimental_distribute_dataset(data))
        for _ in range(-(-feed.rows // feed.batch)):
            seen.append([float(value) for value in whole(iterator)])
    loss, right, rows = map(list, zip(*seen, strict=True))
    return Result(weights_of(model), {"loss": loss, "right": right, "rows": rows}, {}, [])


def accumulated_by_keras(strategy, feed: Feed) -> Result:
    compiled = lambda: {  # noqa: E731
        "optimizer": adam(gradient_accumulation_steps=2, clipnorm=0.5),
        "loss": cross_entropy(),
        "metrics": ["accuracy"],
    }
    return run(strategy, feed, network, compiled, *points(feed))


class Adversarial(keras.Model):
    """Inputs are moved along the sign of their own gradient, and trained on again."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            per_row = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            summed = ops.sum(per_row)
        moved = x + 0.1 * ops.sign(tape.gradient(summed, x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += 0.5 * self.compute_loss(y=y, y_pred=self(moved, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def adversarial_regularization(strategy, feed: Feed) -> Result:
    compiled = lambda: {"optimizer": sgd(), "loss": cross_entropy()}  # noqa: E731
    start()
    with scope(strategy):
        model = Adversarial()
        model.compile(**compiled())
    history = feed.fit(model, *points(feed))
    return Result(weights_of(model), history.history, {}, [])


class MeanTeacher(keras.Model):
    """A student, and a teacher that follows it by assignments in the step."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
        self.teacher.trainable = False
        self.distance = keras.metrics.MeanSquaredError(name="distance")

    def call(self, x):
        return self.teacher(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            answers = self.student(x, training=True)
            loss = self.compute_loss(y=y, y_pred=answers)
            loss += ops.mean(ops.square(answers - self.teacher(x)))
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for mine, theirs in zip(self.teacher.variables, self.student.variables, strict=True):
            mine.assign(0.9 * mine + 0.1 * theirs)
        self.distance.update_state(self.teacher(x), self.student(x))
        return {m.name: m.result() for m in self.metrics}


def mean_teacher(strategy, feed: Feed) -> Result:
    start()
    with scope(strategy):
        model = MeanTeacher()
        model.compile(adam(), cross_entropy())
    history = feed.fit(model, *points(feed))
    x, _ = points(feed)
    return Result(
        weights_of(model), history.history, {}, [model.predict(x, batch_size=4, verbose=0)]
    )


class Consistency(keras.Model):
    """FixMatch: labelled and unlabelled rows side by side, a threshold on what the model trusts."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        (labelled, y), (weak, strong) = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(labelled, training=True))
            guesses = ops.softmax(ops.stop_gradient(self(weak)))
            trusted = ops.cast(ops.max(guesses, axis=-1) > 0.4, "float32")
            against = keras.losses.sparse_categorical_crossentropy(
                ops.argmax(guesses, axis=-1), self(strong, training=True), from_logits=True
            )
            loss += ops.mean(against * trusted)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def consistency_of_two_inputs(strategy, feed: Feed) -> Result:
    """A zip of two data sets: a tuple of tuples."""
    start()
    x, y = points(feed)
    with scope(strategy):
        model = Consistency()
        model.compile(sgd(), cross_entropy())
    data = tf.data.Dataset.zip(feed.batches(x, y), feed.batches(x + 0.01, x[:, ::-1].copy()))
    history = model.fit(data, epochs=2, verbose=0)
    return Result(weights_of(model), history.history, {}, [])


def policy_gradient(strategy, feed: Feed) -> Result:
    """REINFORCE on recorded episodes: actions, rewards, a baseline, entropy, through `fit`."""

    class Actor(keras.Model):
        def __init__(self):
            super().__init__()
            self.policy, self.critic = network(), layers.Dense(1)

        def call(self, x):
            return self.policy(x)

        def train_step(self, data):
            states, actions, rewards = data
            with tf.GradientTape() as tape:
                logs = ops.log_softmax(self.policy(states))
                chosen = ops.sum(logs * ops.one_hot(actions, 3), axis=-1)
                values = self.critic(states)[:, 0]
                advantages = ops.stop_gradient(rewards - values)
                entropy = -ops.sum(ops.exp(logs) * logs, axis=-1)
                actor_loss = -ops.mean(chosen * advantages) - 0.01 * ops.mean(entropy)
                loss = actor_loss + 0.5 * ops.mean((rewards - values) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss, "entropy": ops.mean(entropy)}

    start()
    states, actions = points(feed)
    with scope(strategy):
        model = Actor()
        model.build((None, 5))
        model.critic.build((None, 5))
        model.compile(adam(global_clipnorm=1.0))
    rewards = rng().normal(size=feed.rows).astype("float32")
    history = feed.fit(model, states, actions, rewards)
    return Result(weights_of(model), history.history, {}, [])


def replay_by_hand(strategy, feed: Feed) -> Result:
    """Deep Q-learning: targets by `predict_on_batch`, a copy of weights now and then."""
    start()
    random = rng()
    with scope(strategy):
        model, target = network(), network()
        target.set_weights(model.get_weights())
        model.compile(adam(), "huber")
        target.compile(sgd(), "mse")
    losses = []
    for step in range(4):
        states = random.normal(size=(feed.batch, 5)).astype("float32")
        rewards = random.normal(size=(feed.batch, 1)).astype("float32")
        goal = rewards + 0.9 * np.max(target.predict_on_batch(states), axis=1, keepdims=True)
        y = np.repeat(goal, 3, axis=1)
        losses.append(float(model.train_on_batch(states, y)))
        if step % 2:
            target.set_weights(model.get_weights())
    return Result(weights_of(target), {"loss": losses}, {}, [])


class Physics(keras.Model):
    """A physics-informed network: second derivatives of the output by the input in the loss."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [keras.Input((1,)), layers.Dense(6, activation="tanh"), layers.Dense(1)]
        )

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    u = self(x)
                slope = first.gradient(u, x)
            bend = second.gradient(slope, x)
            loss = ops.mean((u - y) ** 2) + 0.1 * ops.mean((bend + u) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def second_derivatives(strategy, feed: Feed) -> Result:
    start()
    x = np.linspace(0, 3, feed.rows, dtype="float32")[:, None]
    with scope(strategy):
        model = Physics()
        model.compile(sgd())
    history = feed.fit(model, x, np.sin(x))
    return Result(weights_of(model), history.history, {}, [])
