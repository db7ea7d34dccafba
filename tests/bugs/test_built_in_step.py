"""Networks that their first step builds.

The story: a GAN of two `Sequential`s without input shapes trained under ZeRO 1 and 2, and ended in a
ValueError of a Dense layer under stage 3: the values of variables that are made in a step come later in
its graph, and there was nothing yet to cut into shards.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bugs.comparing import check, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import scope, start

ROWS, BATCH = 25, 6  # The last batch has one row.
layers = keras.layers


def rows(seed: int = 3):
    return np.random.default_rng(seed).normal(size=(ROWS, 4)).astype("float32")


def network(*sizes: int, normalized: bool = False):
    middle = [layers.BatchNormalization(synchronized=True)] if normalized else []
    return keras.Sequential(
        [layers.Dense(sizes[0], "tanh"), *middle, *[layers.Dense(size) for size in sizes[1:]]]
    )


class Gan(keras.Model):
    """No `call`, two networks, two optimizers."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(8, 4, normalized=True), network(8, 1)

    def compile(self, first, second, **options):
        super().compile(**options)
        self.first, self.second = first, second

    def losses_of(self, x):
        right = self.critic(x, training=True)
        wrong = self.critic(self.generator(x[:, ::-1], training=True), training=True)
        loss = tf.reduce_mean(tf.nn.softplus(-right)) + tf.reduce_mean(tf.nn.softplus(wrong))
        return loss, tf.reduce_mean(tf.nn.softplus(-wrong))

    def train_step(self, x):
        with tf.GradientTape(persistent=True) as tape:
            critic, generator = self.losses_of(x)
        for loss, network, optimizer in (
            (critic, self.critic, self.second),
            (generator, self.generator, self.first),
        ):
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"critic": critic, "generator": generator}

    def test_step(self, x):
        critic, generator = self.losses_of(x)
        return {"critic": critic, "generator": generator}


class CycleGan(keras.Model):
    """Two translations with a `call` that takes one image, and steps that take pairs."""

    def __init__(self):
        super().__init__()
        self.there, self.back = network(8, 4), network(6, 4)

    def call(self, x):
        return self.there(x)

    def train_step(self, batch):
        x, y = batch["photo"], batch["painting"]
        with tf.GradientTape() as tape:
            cycle = tf.abs(self.back(self.there(x)) - x) + tf.abs(self.there(self.back(y)) - y)
            loss = tf.reduce_mean(cycle)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"cycle": loss}


def rates():
    return keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)


def gan(strategy, **options):
    start()
    with scope(strategy):
        model = Gan()
        model.compile(*rates(), **options)
    history = model.fit(
        rows(), validation_data=rows(4), batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    assert all(layer.built for layer in (model.generator, model.critic))
    return outcome(model, history.history)


def evaluated_first(strategy):
    """The variables are made by an evaluation."""
    start()
    with scope(strategy):
        model = Gan()
        model.compile(*rates())
    found = model.evaluate(rows(), batch_size=BATCH, verbose=0, return_dict=True)
    history = model.fit(rows(), batch_size=BATCH, shuffle=False, verbose=0).history
    return outcome(model, history, found=found)


def cycle_gan(strategy, **options):
    start()
    data = tf.data.Dataset.from_tensor_slices({"photo": rows(), "painting": rows(4)}).batch(BATCH)
    with scope(strategy):
        model = CycleGan()
        model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9), **options)
    history = model.fit(data, epochs=2, verbose=0).history
    return outcome(model, history)


def loop(strategy):
    """A loop of one's own, whose first step makes the variables."""
    start()
    x = rows()
    data = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
    with scope(strategy):
        model, optimizer = network(8, 4), keras.optimizers.Adam(0.01)
    if strategy is not None:
        data = strategy.experimental_distribute_dataset(data)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x) - x[:, ::-1])) / BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    @tf.function(reduce_retracing=True)
    def train(x):
        return step(x) if strategy is None else strategy.run(step, args=(x,))

    with scope(strategy):
        for _ in range(2):
            for x in data:
                train(x)
    return outcome(model)


PROGRAMS = {
    "gan": gan,
    "gan_in_executions": functools.partial(gan, steps_per_execution=2),
    "gan_eagerly": functools.partial(gan, run_eagerly=True),
    "evaluated_first": evaluated_first,
    "cycle_gan": cycle_gan,
    "loop": loop,
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("stage", slow_but([3], [0, 1, 2, 3]))
@pytest.mark.parametrize("name", slow_but(["gan"], PROGRAMS))
def test_as_one_process(pool, one_process, name, stage):
    check(pool, one_process, PROGRAMS[name], tolerance=2e-5, zero_stage=stage)
