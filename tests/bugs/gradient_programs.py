"""Training steps of other people's that do something with gradients before the optimizer gets them."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.bugs.comparing import outcome
from tests.strategies.programs import scope, start

ROWS, BATCH, FEATURES, CLASSES = 41, 8, 6, 3  # The last batch has one row: a rank has none.


def data():
    chance = np.random.default_rng(11)
    x = chance.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, chance.integers(0, CLASSES, ROWS)


def network():
    return [
        keras.Input((FEATURES,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dense(1, use_bias=False),
        keras.layers.Dense(CLASSES),
    ]


def cross_entropy(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


class Plain(keras.Sequential):
    """Hands gradients on."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, batch):
        loss, gradients = self.gradients(*batch)
        logs = self.apply(gradients)
        return {"loss": loss, **logs}

    def apply(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class Clips(Plain):
    def apply(self, gradients):
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"norm": norm}


class ClipsEach(Plain):
    def apply(self, gradients):
        gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]
        return super().apply(gradients)


class LogsNorm(Plain):
    """What is applied is as the tape returned it."""

    def apply(self, gradients):
        super().apply(gradients)
        return {"norm": tf.linalg.global_norm(gradients)}


class Decays(Plain):
    def apply(self, gradients):
        pairs = zip(gradients, self.trainable_variables, strict=True)
        return super().apply([gradient + 0.01 * variable for gradient, variable in pairs])


class UpdatesByHand(Plain):
    def apply(self, gradients):
        for gradient, variable in zip(gradients, self.trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {}


class Accumulates(Plain):
    """Updates every three steps, over batches of unequal sizes."""

    def prepare(self):
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"sum{i}")
            for i, v in enumerate(self.trainable_variables)
        ]
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )

    def apply(self, gradients):
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)

        def update():
            means = [tf.convert_to_tensor(total.value) / 3.0 for total in self.sums]
            self.optimizer.apply(means, self.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            return 0

        tf.cond(tf.equal(self.count % 3, 0), update, lambda: 0)
        return {}


class MicroBatches(Plain):
    """The mean over parts of the batch, in a loop of Python's."""

    parts = 2

    def gradients(self, x, y):
        total, sums = 0.0, [0.0] * len(self.trainable_variables)
        for part in range(self.parts):
            loss, gradients = super().gradients(x, y)
            sums = [
                own + gradient / self.parts for own, gradient in zip(sums, gradients, strict=True)
            ]
            total += loss / self.parts * (1 + 0 * part)
        return total, sums


class MicroBatchesInLoop(Plain):
    """The same in a loop of TensorFlow's, of which the optimizer gets what comes out."""

    def gradients(self, x, y):
        start = [tf.zeros(variable.shape) for variable in self.trainable_variables]

        def body(count, total, sums):
            loss, gradients = Plain.gradients(self, x, y)
            sums = [own + gradient / 2 for own, gradient in zip(sums, gradients, strict=True)]
            return count + 1, total + loss / 2, sums

        _, total, sums = tf.while_loop(lambda count, *_: count < 2, body, [0, 0.0, start])
        return total, sums


class Sam(Plain):
    """Sharpness-aware minimization: a second gradient where the first one leads uphill."""

    def train_step(self, batch):
        loss, gradients = self.gradients(*batch)
        norm = tf.linalg.global_norm(gradients)
        steps = [0.05 * gradient / norm for gradient in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        _, gradients = self.gradients(*batch)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Maml(Plain):
    """A step of each model's own inside of the one that is trained."""

    def train_step(self, batch):
        x, y = batch
        first = self.layers[-1].kernel
        with tf.GradientTape() as outer:
            hidden = self.layers[1](self.layers[0](x))
            with tf.GradientTape() as inner:
                inner_loss = tf.reduce_mean(cross_entropy(y, self.layers[2](hidden)))
            # Of a constant number of rows, so that one process has the same.
            inner.gradient(inner_loss, first)
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Penalty(Plain):
    """WGAN-GP: the gradient with respect to the inputs is a part of the loss."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                logits = self(x, training=True)
            slopes = inner.gradient(logits, x)
            penalty = tf.reduce_mean(tf.square(tf.norm(slopes, axis=-1) - 1.0))
            loss = self.compute_loss(x, y, logits) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        return loss, tf.clip_by_global_norm(gradients, 0.5)[0]


class PrivatePerRow(Plain):
    """DP-SGD without its noise: the gradient of each row is clipped."""

    def gradients(self, x, y):
        def of_a_row(row):
            own, label = row
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(cross_entropy(label[None], self(own[None])))
            found = tape.gradient(loss, self.trainable_variables)
            return tf.clip_by_global_norm(found, 0.2)[0], loss

        found, losses = tf.vectorized_map(of_a_row, (x, y))
        return tf.reduce_mean(losses), [tf.reduce_mean(each, axis=0) for each in found]


class PrivateByJacobian(Plain):
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            losses = cross_entropy(y, self(x))
        found = tape.jacobian(losses, self.trainable_variables)
        squares = sum(
            tf.reduce_sum(tf.square(each), axis=list(range(1, each.shape.rank))) for each in found
        )
        scales = tf.minimum(1.0, 0.2 / tf.sqrt(squares))
        clipped = [tf.tensordot(scales, each, 1) for each in found]
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        return tf.reduce_mean(losses), [each / rows for each in clipped]


class GradNorm(Plain):
    """Weights of two losses follow the norms of their gradients."""

    def prepare(self):
        self.mix = self.add_weight(shape=(2,), initializer="ones", trainable=False, name="mix")

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            logits = self(x, training=True)
            losses = [tf.reduce_mean(cross_entropy(y, logits)), tf.reduce_mean(tf.square(logits))]
            total = losses[0] * self.mix[0] + losses[1] * self.mix[1]
        shared = self.layers[0].kernel
        norms = tf.stack([tf.norm(tape.gradient(loss, shared)) for loss in losses])
        gradients = tape.gradient(total, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        mean = tf.reduce_mean(norms * self.mix)
        self.mix.assign_sub(0.05 * tf.sign(norms * self.mix - mean) * norms)
        return {"loss": total, "first": norms[0], "second": norms[1]}


class TwoOptimizers(keras.Model):
    """A GAN, whose critic's gradients are clipped by hand; the generator's are handed on."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(FEATURES)]
        )
        self.critic = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        self.of_generator = keras.optimizers.Adam(0.01)
        self.of_critic = keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, batch):
        x, _ = batch
        with tf.GradientTape() as one, tf.GradientTape() as other:
            made = self.generator(x)
            right, wrong = self.critic(x), self.critic(made)
            of_critic = tf.reduce_mean(tf.nn.softplus(-right)) + tf.reduce_mean(
                tf.nn.softplus(wrong)
            )
            of_generator = tf.reduce_mean(tf.nn.softplus(-wrong))
        for_critic = one.gradient(of_critic, self.critic.trainable_variables)
        for_critic, norm = tf.clip_by_global_norm(for_critic, 0.2)
        self.of_critic.apply(for_critic, self.critic.trainable_variables)
        for_generator = other.gradient(of_generator, self.generator.trainable_variables)
        self.of_generator.apply(for_generator, self.generator.trainable_variables)
        return {"critic": of_critic, "generator": of_generator, "norm": norm}


class Distills(Plain):
    """Learns from a teacher; the gradients are a dict, and their direction is given."""

    def prepare(self):
        self.teacher = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
        self.teacher.trainable = False

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            soft = tf.reduce_mean(tf.square(logits - self.teacher(x)))
            loss = 0.5 * self.compute_loss(x, y, logits) + 0.5 * soft
        named = {str(place): each for place, each in enumerate(self.trainable_variables)}
        found = tape.gradient(loss, named, output_gradients=tf.constant(0.5))
        return loss, [2.0 * found[name] for name in named]


class MeansByHand(Plain):
    """A mean over the replicas, as some take it before the optimizer."""

    def apply(self, gradients):
        if tf.distribute.has_strategy():
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("MEAN", gradients)
        return super().apply(gradients)


class Words(Plain):
    """An embedding, whose gradient is sparse."""

    def apply(self, gradients):
        gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"norm": norm}


class AdaptiveClipping(keras.optimizers.SGD):
    """An optimizer of one's own: no gradient is longer than a part of its variable."""

    def apply(self, grads, trainable_variables=None):
        clipped = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            limit = 0.05 * tf.maximum(tf.norm(variable), 1e-3)
            clipped.append(gradient * tf.minimum(1.0, limit / tf.maximum(tf.norm(gradient), 1e-6)))
        super().apply(clipped, trainable_variables)


def words():
    return [
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(20, 5),
        keras.layers.Flatten(),
        keras.layers.Dense(CLASSES),
    ]


def train(
    strategy,
    step=Plain,
    *,
    optimizer=None,
    layers=network,
    policy: str = "float32",
    epochs: int = 2,
    **compiled,
):
    start()
    keras.config.set_dtype_policy(policy)
    try:
        x, y = data()
        if layers is words:
            x = np.random.default_rng(5).integers(0, 20, (ROWS, 4)).astype("int32")
        with scope(strategy):
            model = step() if step is TwoOptimizers else step(layers())
            if hasattr(model, "prepare"):
                model.prepare()
            rule = optimizer() if optimizer is not None else keras.optimizers.SGD(0.1, momentum=0.9)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(rule, loss, **compiled)
        if not model.built:
            model.build((None, FEATURES))
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
    finally:
        keras.config.set_dtype_policy("float32")
    return outcome(model, history)


STEPS = [
    Clips,
    ClipsEach,
    LogsNorm,
    Decays,
    UpdatesByHand,
    Accumulates,
    MicroBatches,
    MicroBatchesInLoop,
    Sam,
    Maml,
    Penalty,
    PrivatePerRow,
    PrivateByJacobian,
    GradNorm,
    TwoOptimizers,
    Distills,
    MeansByHand,
]
PROGRAMS = {step.__name__: functools.partial(train, step=step) for step in STEPS} | {
    "Words": functools.partial(train, step=Words, layers=words, optimizer=keras.optimizers.Adam),
    "AdaptiveClipping": functools.partial(
        train, step=Plain, optimizer=lambda: AdaptiveClipping(0.1)
    ),
    "StockStepOwnOptimizer": functools.partial(
        train, step=keras.Sequential, optimizer=lambda: AdaptiveClipping(0.1)
    ),
    "ClipsAndAccumulates": functools.partial(
        train,
        step=Clips,
        optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    ),
    "ClipsTwice": functools.partial(
        train, step=Clips, optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    ),
    "ClipsMixedPrecision": functools.partial(train, step=Clips, policy="mixed_float16"),
    "ClipsInExecutions": functools.partial(train, step=Clips, steps_per_execution=3),
}
