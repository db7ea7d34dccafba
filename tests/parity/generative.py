"""Models that make pictures, as the examples of Keras write them: a train step of their own each."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start

__all__ = [
    "conditional_gan",
    "dcgan",
    "denoising_autoencoder",
    "diffusion",
    "gan_of_batches",
    "vae",
    "vae_by_layers",
    "vq_vae",
    "wgan_gp",
]


def pictures(rows: int):
    return rng().uniform(-1, 1, (rows, 8, 8, 1)).astype("float32")


def noise(rows: int, size: int = 4):
    return rng().normal(size=(rows, size)).astype("float32")


def generator(size: int = 4):
    return keras.Sequential(
        [
            keras.Input((size,)),
            layers.Dense(4 * 4 * 3),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((4, 4, 3)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def discriminator(channels: int = 1):
    return keras.Sequential(
        [
            keras.Input((8, 8, channels)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Dropout(0.0),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """The DCGAN of the guide: two networks, two optimizers, no `call`.

    The noise is part of the data, since ranks draw different numbers.
    """

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = discriminator(), generator()
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, data):
        real, noise = data
        rows = ops.shape(real)[0]
        combined = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), predictions)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


def weights_of(model) -> dict:
    return {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}


def dcgan(strategy, feed: Feed) -> Result:
    start()
    with scope(strategy):
        model = GAN()
        model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True))
    history = feed.fit(model, pictures(feed.rows), noise(feed.rows))
    return Result(weights_of(model), history.history, {}, [])


class ConditionalGAN(GAN):
    """Labels as more channels of a picture, and as more numbers of the noise."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = discriminator(1 + 3), generator(4 + 3)

    def train_step(self, data):
        (real, one_hot), noise = data
        planes = ops.repeat(ops.reshape(one_hot, (-1, 1, 1, 3)), repeats=8, axis=1)
        planes = ops.repeat(planes, repeats=8, axis=2)
        given = ops.concatenate([noise, one_hot], axis=1)
        made = self.generator(given)
        with tf.GradientTape() as tape:
            on_made = self.discriminator(ops.concatenate([made, planes], -1))
            on_real = self.discriminator(ops.concatenate([real, planes], -1))
            d_loss = self.loss_fn(ops.ones_like(on_made), on_made)
            d_loss += self.loss_fn(ops.zeros_like(on_real), on_real)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            on_made = self.discriminator(ops.concatenate([self.generator(given), planes], -1))
            g_loss = self.loss_fn(ops.zeros_like(on_made), on_made)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def conditional_gan(strategy, feed: Feed) -> Result:
    start()
    one_hot = keras.utils.to_categorical(rng().integers(0, 3, feed.rows), 3)
    with scope(strategy):
        model = ConditionalGAN()
        model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True))
    history = feed.fit(model, (pictures(feed.rows), one_hot), noise(feed.rows))
    return Result(weights_of(model), history.history, {}, [])


class WGAN(GAN):
    """Critic steps in a loop and a gradient penalty: a tape inside a tape."""

    def train_step(self, data):
        real, noise, mixing = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                cost = ops.mean(self.discriminator(made)) - ops.mean(self.discriminator(real))
                between = real + mixing * (made - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    judged = self.discriminator(between)
                slopes = inner.gradient(judged, between)
                norm = ops.sqrt(ops.sum(ops.square(slopes), axis=[1, 2, 3]) + 1e-6)
                d_loss = cost + 10.0 * ops.mean((norm - 1.0) ** 2)
            weights = self.discriminator.trainable_variables
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp(strategy, feed: Feed) -> Result:
    start()
    rate = keras.optimizers.SGD
    mixing = rng().uniform(size=(feed.rows, 1, 1, 1)).astype("float32")
    with scope(strategy):
        model = WGAN()
        model.compile(rate(0.01), rate(0.01), None)
    history = feed.fit(model, pictures(feed.rows), noise(feed.rows), mixing)
    return Result(weights_of(model), history.history, {}, [])


def gan_of_batches(strategy, feed: Feed) -> Result:
    """The oldest form: `train_on_batch` of a discriminator, then of a model that it is frozen in."""
    start()
    real, given = feed.arranged((pictures(feed.rows), noise(feed.rows)))
    with scope(strategy):
        judge = discriminator()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        judge.compile(sgd(), loss)
        make = generator()
        judge.trainable = False
        whole = keras.Sequential([make, judge])
        whole.compile(sgd(), loss)
    losses = []
    for i in range(0, feed.rows, feed.batch):
        rows = slice(i, i + feed.batch)
        made = make.predict_on_batch(given[rows])
        x = tf.concat([real[rows], made], 0)
        y = tf.concat([tf.ones((len(made), 1)), tf.zeros((len(made), 1))], 0)
        losses.append(float(judge.train_on_batch(x, y)))
        losses.append(float(whole.train_on_batch(given[rows], tf.ones((len(made), 1)))))
    return Result(weights_of(whole), {"loss": losses}, {}, [])


class Sampling(layers.Layer):
    """Draws z by the distribution that the encoder found, from numbers that come with the data."""

    def call(self, inputs):
        mean, log_var, epsilon = inputs
        return mean + ops.exp(0.5 * log_var) * epsilon


def encoder():
    image, epsilon = keras.Input((8, 8, 1)), keras.Input((2,))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    mean, log_var = layers.Dense(2, name="mean")(x), layers.Dense(2, name="log_var")(x)
    return keras.Model([image, epsilon], [mean, log_var, Sampling()([mean, log_var, epsilon])])


class VAE(keras.Model):
    """The VAE of the examples: trackers, a train step, and no `call`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = encoder(), generator(2)
        self.total = keras.metrics.Mean(name="total_loss")
        self.reconstruction = keras.metrics.Mean(name="reconstruction_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")
        self.built = True

    @property
    def metrics(self):
        return [self.total, self.reconstruction, self.kl]

    def losses_of(self, data):
        image, epsilon = data
        mean, log_var, z = self.encoder([image, epsilon])
        errors = ops.sum(ops.square(image - self.decoder(z)), axis=(1, 2, 3))
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        return ops.mean(errors), ops.mean(ops.sum(kl, axis=1))

    def train_step(self, data):
        data = data[0]
        with tf.GradientTape() as tape:
            reconstruction, kl = self.losses_of(data)
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for metric, value in zip(self.metrics, (total, reconstruction, kl), strict=True):
            metric.update_state(value)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        reconstruction, kl = self.losses_of(data[0])
        return {"reconstruction": reconstruction, "kl": kl}


def vae(strategy, feed: Feed) -> Result:
    start()
    with scope(strategy):
        model = VAE()
        model.compile(optimizer=adam())
    x = (pictures(feed.rows), noise(feed.rows, 2))
    history = feed.fit(model, x)
    return Result(weights_of(model), history.history, {}, [])


class KLLoss(layers.Layer):
    def call(self, inputs):
        mean, log_var = inputs
        kl = -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
        self.add_loss(kl)
        return mean


def vae_by_layers(strategy, feed: Feed) -> Result:
    """`add_loss` in a layer, and a model that Keras trains by itself."""

    def build():
        image, epsilon = keras.Input((8, 8, 1)), keras.Input((2,))
        mean, log_var, z = encoder()([image, epsilon])
        mean = KLLoss()([mean, log_var])
        return keras.Model([image, epsilon], generator(2)(z + 0.0 * mean))

    x = pictures(feed.rows)
    compiled = lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]}  # noqa: E731
    return run(strategy, feed, build, compiled, (x, noise(feed.rows, 2)), x)


class VectorQuantizer(layers.Layer):
    """The nearest of a table's columns, straight through for the gradient, with a loss of its own."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=(shape[-1], 6), initializer=keras.initializers.RandomUniform(seed=1), name="table"
        )

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        distances = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.table**2, axis=0)
        distances -= 2 * ops.matmul(flat, self.table)
        codes = ops.one_hot(ops.argmin(distances, axis=1), 6)
        quantized = ops.reshape(ops.matmul(codes, ops.transpose(self.table)), ops.shape(x))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(quantized) - x) ** 2))
        self.add_loss(ops.mean((quantized - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(quantized - x)


def vq_vae(strategy, feed: Feed) -> Result:
    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, strides=2, activation="relu", padding="same")(image)
        x = VectorQuantizer()(layers.Conv2D(3, 1)(x))
        x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
        return keras.Model(image, layers.Conv2D(1, 3, padding="same")(x))

    x = pictures(feed.rows)
    return run(strategy, feed, build, lambda: {"optimizer": sgd(), "loss": "mse"}, x, x)


def denoising_autoencoder(strategy, feed: Feed) -> Result:
    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
        x = layers.MaxPooling2D(2, padding="same")(x)
        x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
        return keras.Model(image, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))

    clean = (pictures(feed.rows) + 1) / 2
    noisy = clean + 0.4 * rng().normal(size=clean.shape).astype("float32")
    compiled = lambda: {"optimizer": adam(), "loss": "binary_crossentropy"}  # noqa: E731
    return run(strategy, feed, build, compiled, noisy, clean)


class Diffusion(keras.Model):
    """A denoising diffusion model: a step with its noise, and a copy that follows its weights."""

    def __init__(self):
        super().__init__()
        self.normalizer = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Rescaling(2.0, offset=-0.2)]
        )
        self.network = self.make_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.noise_loss = keras.metrics.Mean(name="n_loss")
        self.built = True

    @staticmethod
    def make_network():
        image, variance = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
        x = layers.Concatenate()([image, layers.UpSampling2D(8)(variance)])
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
        return keras.Model([image, variance], layers.Conv2D(1, 1)(x))

    @property
    def metrics(self):
        return [self.noise_loss]

    def train_step(self, data):
        images, noises, times = data
        images = self.normalizer(images, training=True)
        signal_rates, noise_rates = ops.cos(times), ops.sin(times)
        noisy = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            found = self.network([noisy, noise_rates**2], training=True)
            loss = self.compiled_loss_of(noises, found)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.noise_loss.update_state(loss)
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in pairs:
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def compiled_loss_of(self, y, y_pred):
        return ops.mean(ops.abs(y - y_pred))


def diffusion(strategy, feed: Feed) -> Result:
    start()
    times = rng().uniform(0.1, 1.4, (feed.rows, 1, 1, 1)).astype("float32")
    with scope(strategy):
        model = Diffusion()
        model.compile(optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-4))
    noises = rng().normal(size=(feed.rows, 8, 8, 1)).astype("float32")
    history = feed.fit(model, pictures(feed.rows), noises, times)
    return Result(weights_of(model), history.history, {}, [])
