"""Steps whose losses are made of gradients, alike on ranks and in one process."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.bugs.comparing import outcome
from tests.strategies.programs import scope, start
from tfdist.recompute import recompute

__all__ = ["PROGRAMS"]

ROWS, BATCH = 25, 6  # The last batch has one row.
layers = keras.layers


def rows():
    x = np.random.default_rng(3).normal(size=(ROWS, 2)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True))


def network():
    return [
        keras.Input((2,)),
        layers.Dense(8, "tanh"),
        layers.Dense(8, "tanh"),
        layers.Dense(6, "tanh"),
        layers.Dense(1),
    ]


def again():
    found = network()
    return [found[0], *[recompute(layer) for layer in found[1:3]], *found[3:]]


def attention():
    """A layer with several parameters, and products of what it makes of them."""
    x = keras.Input((2,))
    y = layers.Reshape((2, 4))(layers.Dense(8, "tanh")(x))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 3)(y, y))
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(layers.Dense(5, "tanh")(y))))


class Steps(keras.Model):
    """Trains a network by `loss_of`."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"total": loss}


class Pinn(Steps):
    """Second derivatives by the inputs: three tapes, one in the other."""

    def loss_of(self, x, y):
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                u = self.net(x, training=True)
            slope = first.gradient(u, x)
        curvature = second.gradient(slope, x)
        return tf.reduce_mean(tf.square(curvature + u[:, :1])) + tf.reduce_mean(tf.square(u - y))


class Penalty(Steps):
    """The norm of the gradient by the inputs, as that of a critic."""

    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            u = self.net(x, training=True)
        norm = tf.sqrt(1e-6 + tf.reduce_sum(tf.square(tape.gradient(u, x)), axis=1))
        return tf.reduce_mean(tf.square(norm - 1.0)) + tf.reduce_mean(tf.square(u - y))


class OnePoint(Steps):
    """The penalty at other points than the loss, so that layers are called twice."""

    def loss_of(self, x, y):
        between = 0.5 * (x + x[:, ::-1])
        with tf.GradientTape() as tape:
            tape.watch(between)
            u = self.net(between, training=True)
        penalty = tf.reduce_mean(tf.square(tape.gradient(u, between)))
        return penalty + tf.reduce_mean(tf.square(self.net(x, training=True) - y))


class HessianVector(Steps):
    """The update is the curvature along a direction of the parameters: one gradient of another."""

    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * tf.add_n([tf.reduce_sum(gradient) for gradient in gradients])


class Learned(Steps):
    """The loss of the network after a step of SGD inside, by the inputs' gradient (MAML of first inputs)."""

    def loss_of(self, x, y):
        moved = x
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(moved)
                error = tf.reduce_sum(tf.square(self.net(moved, training=True) - y))
            moved = moved - 0.1 * tape.gradient(error, moved)
        return tf.reduce_mean(tf.square(self.net(moved, training=True) - y))


def train(strategy, step=Pinn, layers=network, **compiled):
    start()
    x, y = rows()
    with scope(strategy):
        made = layers()
        model = step(made if isinstance(made, keras.Model) else keras.Sequential(made))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compiled)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return outcome(model, history)


STEPS = [Pinn, Penalty, OnePoint, HessianVector, Learned]
PROGRAMS = (
    {step.__name__: functools.partial(train, step=step) for step in STEPS}
    | {
        f"{step.__name__}Again": functools.partial(train, step=step, layers=again)
        for step in (Pinn, Penalty)
    }
    | {
        f"{step.__name__}Attention": functools.partial(train, step=step, layers=attention)
        for step in (Pinn, Penalty, OnePoint)
    }
    | {
        "PinnInExecutions": functools.partial(train, steps_per_execution=2),
        "PinnEagerly": functools.partial(train, run_eagerly=True),
    }
)
