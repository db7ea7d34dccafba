"""The GPT and the ConvNet of tfdist.models, written for tf_keras."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import tensorflow as tf
import tf_keras

from .serving import Settings


class Embedding(tf_keras.layers.Layer):
    """Tokens and their positions; its kernel is the head's, too."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self._sizes = sizes

    def build(self, shape):
        """Adds the two tables."""
        sizes, normal = self._sizes, tf_keras.initializers.RandomNormal(stddev=0.02)
        self.table = self.add_weight(
            "table", (sizes["vocabulary"], sizes["width"]), initializer=normal
        )
        self.positions = self.add_weight(
            "positions", (sizes["tokens"], sizes["width"]), initializer=normal
        )

    def call(self, tokens):
        """[batch, time] to [batch, time, width]."""
        # The product makes the gradient an array: as rows of a table it would be gathered from all
        # ranks, and be larger.
        return tf.gather(self.table * 1.0, tokens) + self.positions


class Block(tf_keras.layers.Layer):
    """A pre-norm transformer block with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        small = 0.02 / math.sqrt(2 * layers)
        self._heads, self._size = heads, width // heads
        self._norms = [tf_keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self._qkv = _dense(3 * width)
        self._out = _dense(width, small)
        self._up = _dense(4 * width)
        self._down = _dense(width, small)

    def call(self, x):
        """[batch, time, width] to the same."""
        batch, time, width = tf.shape(x)[0], x.shape[1], x.shape[2]
        fused = tf.reshape(self._qkv(self._norms[0](x)), [batch, time, 3, self._heads, self._size])
        query, key, value = tf.unstack(tf.transpose(fused, [2, 0, 3, 1, 4]))
        scores = tf.matmul(query / math.sqrt(self._size), key, transpose_b=True)
        hidden = 1.0 - tf.linalg.band_part(tf.ones([time, time]), -1, 0)
        weights = tf.nn.softmax(scores - 1e9 * hidden)
        attended = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
        x += self._out(tf.reshape(attended, [batch, time, width]))
        return x + self._down(tf.nn.gelu(self._up(self._norms[1](x)), approximate=True))


class GPT(tf_keras.Model):
    """The decoder."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        layers = sizes["layers"]
        self._embedding = Embedding(sizes)
        self._blocks = [Block(sizes["width"], sizes["heads"], layers) for _ in range(layers)]
        self._norm = tf_keras.layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens):
        """[batch, time] to logits [batch, time, vocabulary]."""
        x = self._embedding(tokens)
        for block in self._blocks:
            x = block(x)
        return tf.matmul(self._norm(x), self._embedding.table, transpose_b=True)


def convnet(sizes: Mapping[str, int]) -> tf_keras.Model:
    """Two blocks of two convolutions, a hidden layer and logits."""
    layers = tf_keras.layers
    model = tf_keras.Sequential([layers.Input((sizes["side"], sizes["side"], 3))])
    for filters in (32, 64):
        for _ in range(2):
            model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(layers.BatchNormalization(momentum=0.9))
            model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    for layer in (
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.25),
        layers.Dense(sizes["classes"]),
    ):
        model.add(layer)
    return model


def make_model(settings: Settings) -> tf_keras.Model:
    """The model, built, not compiled."""
    sizes = settings.sizes
    if settings.model == "convnet":
        return convnet(sizes)
    model = GPT(sizes)
    model(tf.zeros([1, sizes["tokens"]], tf.int32))
    return model


def make_loss():
    """The cross-entropy."""
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def count(model: tf_keras.Model) -> int:
    """How many parameters are trained."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def clock(note: Callable[[float], None]) -> tf_keras.callbacks.Callback:
    """A callback that notes when steps begin."""
    return tf_keras.callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: note(time.perf_counter())
    )


def limit_threads(settings: Settings) -> None:
    """As many threads as are allowed; a second to wait in collectives."""
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def _dense(units: int, stddev: float = 0.02) -> tf_keras.layers.Dense:
    return tf_keras.layers.Dense(
        units, kernel_initializer=tf_keras.initializers.RandomNormal(stddev=stddev)
    )
