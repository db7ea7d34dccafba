"""The GPT, the ConvNet and the DLRM of tfdist.models, written for tf_keras."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import tensorflow as tf
import tf_keras

from .convnet import convnet
from .serving import Settings


class Embedding(tf_keras.layers.Layer):
    """Tokens and their positions; its kernel is the head's, too.

    Args:
        sizes: Of the model.
        stock: Whether rows are gathered as in Keras' own layer.
    """

    def __init__(self, sizes: Mapping[str, int], stock: bool):
        super().__init__()
        self._sizes, self._stock = sizes, stock

    def build(self, shape):
        """Adds the two tables."""
        width = self._sizes["width"]
        self.table, self.positions = (
            self.add_weight(name, (self._sizes[name], width), initializer=_normal())
            for name in ("vocabulary", "tokens")
        )

    def call(self, tokens):
        """[batch, time] to [batch, time, width]."""
        # The product makes the gradient an array: as rows of a table it would be gathered from all
        # ranks, and be larger.
        table = self.table if self._stock else self.table * 1.0
        return tf.gather(table, tokens) + self.positions


class Block(tf_keras.layers.Layer):
    """A pre-norm transformer block.

    Args:
        width: Of the residual stream.
        heads: Of attention.
        layers: How many blocks the model has.
        stock: Whether attention is Keras' own layer; else it is written by hand, with one product
            for queries, keys and values.
    """

    def __init__(self, width: int, heads: int, layers: int, stock: bool):
        super().__init__()
        small = 0.02 / math.sqrt(2 * layers)
        self._heads, self._size = heads, width // heads
        self._norms = [tf_keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self._stock = None
        if stock:
            self._stock = tf_keras.layers.MultiHeadAttention(
                heads, width // heads, kernel_initializer=_normal()
            )
        else:
            self._qkv = _dense(3 * width)
            self._out = _dense(width, small)
        self._up = _dense(4 * width)
        self._down = _dense(width, small)

    def call(self, x):
        """[batch, time, width] to the same."""
        x += self._attend(self._norms[0](x))
        return x + self._down(tf.nn.gelu(self._up(self._norms[1](x)), approximate=True))

    def _attend(self, x):
        if self._stock is not None:
            return self._stock(x, x, use_causal_mask=True)
        batch, time, width = tf.shape(x)[0], x.shape[1], x.shape[2]
        fused = tf.reshape(self._qkv(x), [batch, time, 3, self._heads, self._size])
        query, key, value = tf.unstack(tf.transpose(fused, [2, 0, 3, 1, 4]))
        scores = tf.matmul(query / math.sqrt(self._size), key, transpose_b=True)
        hidden = 1.0 - tf.linalg.band_part(tf.ones([time, time]), -1, 0)
        weights = tf.nn.softmax(scores - 1e9 * hidden)
        attended = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
        return self._out(tf.reshape(attended, [batch, time, width]))


class GPT(tf_keras.Model):
    """The decoder; `stock` as for a block."""

    def __init__(self, sizes: Mapping[str, int], stock: bool):
        super().__init__()
        layers, width, heads = sizes["layers"], sizes["width"], sizes["heads"]
        self._embedding = Embedding(sizes, stock)
        self._blocks = [Block(width, heads, layers, stock) for _ in range(layers)]
        self._norm = tf_keras.layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens):
        """[batch, time] to logits [batch, time, vocabulary]."""
        x = self._embedding(tokens)
        for block in self._blocks:
            x = block(x)
        return tf.matmul(self._norm(x), self._embedding.table, transpose_b=True)


def dlrm(sizes: Mapping[str, int]) -> tf_keras.Model:
    """A recommender: a bottom perceptron, embeddings, the products of all pairs, a top perceptron."""
    layers, width, hidden = tf_keras.layers, sizes["width"], sizes["hidden"]
    dense = x = layers.Input((sizes["dense"],), name="dense")
    for number, units in enumerate((hidden, width)):
        # With names of their own: Keras would call one "dense", as the input is.
        x = layers.Dense(units, activation="relu", name=f"bottom_{number}")(x)
    ids, vectors = {}, [x]
    limit = sizes["vocabulary"] ** -0.5
    for number in range(sizes["tables"]):
        name = f"id_{number}"
        ids[name] = layers.Input((1,), dtype="int32", name=name)
        uniform = tf_keras.initializers.RandomUniform(-limit, limit)
        table = layers.Embedding(sizes["vocabulary"], width, embeddings_initializer=uniform)
        vectors.append(table(ids[name])[:, 0])
    y = layers.Concatenate()([x, _Pairs()(vectors)])
    for number, units in enumerate((2 * hidden, hidden)):
        y = layers.Dense(units, activation="relu", name=f"top_{number}")(y)
    return tf_keras.Model({"dense": dense, **ids}, layers.Dense(1, name="logits")(y))


class _Pairs(tf_keras.layers.Layer):
    """The dot products of all pairs of several vectors [rows, width]: [rows, pairs]."""

    def call(self, vectors):
        """Takes a list of vectors."""
        stacked, count = tf.stack(vectors, axis=1), len(vectors)
        products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, count * count])
        places = [row * count + column for row in range(count) for column in range(row)]
        return tf.gather(products, places, axis=1)


def make_model(settings: Settings) -> tf_keras.Model:
    """The model, built, not compiled."""
    sizes = settings.sizes
    if settings.model == "dlrm":
        return dlrm(sizes)
    if settings.model == "convnet":
        return convnet(tf_keras, sizes)
    model = GPT(sizes, stock=settings.options["stock"])
    model(tf.zeros([1, sizes["tokens"]], tf.int32))
    return model


def make_optimizer(settings: Settings):
    """Adam; plain gradient descent for the DLRM, as its authors have it."""
    if settings.model == "dlrm":
        return tf_keras.optimizers.SGD(0.1)
    return tf_keras.optimizers.Adam(1e-3)


def make_loss(settings: Settings):
    """The cross-entropy."""
    if settings.model == "dlrm":
        return tf_keras.losses.BinaryCrossentropy(from_logits=True)
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def count(model: tf_keras.Model) -> int:
    """How many parameters are trained."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def clock(note: Callable[[], None]) -> tf_keras.callbacks.Callback:
    """A callback that notes when steps begin."""
    return tf_keras.callbacks.LambdaCallback(on_batch_begin=lambda batch, logs: note())


def limit_threads(settings: Settings) -> None:
    """As many threads as are allowed; a second to wait in collectives."""
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def _dense(units: int, stddev: float = 0.02) -> tf_keras.layers.Dense:
    return tf_keras.layers.Dense(units, kernel_initializer=_normal(stddev))


def _normal(stddev: float = 0.02) -> tf_keras.initializers.Initializer:
    return tf_keras.initializers.RandomNormal(stddev=stddev)
