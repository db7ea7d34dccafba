"""The GPT and the ConvNet of tfdist.models, written for Keras 3 on JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import keras
from keras import ops

from .convnet import convnet
from .serving import Settings


class Embedding(keras.layers.Layer):
    """Tokens and their positions; its kernel is the head's, too."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__(name="embedding")
        self._sizes = sizes

    def build(self, shape):
        """Adds the two tables."""
        self.table, self.positions = (
            self.add_weight(
                shape=(self._sizes[name], self._sizes["width"]), initializer=_normal(), name=name
            )
            for name in ("vocabulary", "tokens")
        )

    def call(self, tokens):
        """[batch, time] to [batch, time, width]."""
        return ops.take(self.table, tokens, axis=0) + self.positions

    def logits(self, x):
        """[batch, time, width] to [batch, time, vocabulary]."""
        return ops.matmul(x, ops.transpose(self.table))


class Block(keras.layers.Layer):
    """A pre-norm transformer block with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, layers: int, name: str):
        super().__init__(name=name)
        small = 0.02 / math.sqrt(2 * layers)
        self._heads, self._size = heads, width // heads
        self.norm1, self.norm2 = (
            keras.layers.LayerNormalization(epsilon=1e-5, name=f"norm{number}") for number in (1, 2)
        )
        # The three lie one after the other, each with its heads: no other order was faster, and a
        # slice of the last dim has whole heads.
        self.qkv = keras.layers.EinsumDense(
            "btw,wcn->btcn",
            (None, 3, width),
            bias_axes="cn",
            kernel_initializer=_normal(),
            name="qkv",
        )
        self.out = _dense(width, "out", small)
        self.up = _dense(4 * width, "up")
        self.down = _dense(width, "down", small)

    def call(self, x):
        """[batch, time, width] to the same."""
        x = x + self._attend(self.norm1(x))
        return x + self.down(ops.gelu(self.up(self.norm2(x)), approximate=True))

    def _attend(self, x):
        _, time, width = x.shape
        fused = ops.reshape(self.qkv(x), [-1, time, 3, self._heads, self._size])
        query, key, value = (ops.transpose(fused[:, :, index], [0, 2, 1, 3]) for index in range(3))
        scores = ops.matmul(query / math.sqrt(self._size), ops.transpose(key, [0, 1, 3, 2]))
        seen = ops.tril(ops.ones([time, time], "bool"))
        weights = ops.softmax(scores + ops.where(seen, 0.0, -1e9))
        attended = ops.transpose(ops.matmul(weights, value), [0, 2, 1, 3])
        return self.out(ops.reshape(attended, [-1, time, width]))


class GPT(keras.Model):
    """The decoder."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__(name="gpt")
        layers, width, heads = sizes["layers"], sizes["width"], sizes["heads"]
        self.embedding = Embedding(sizes)
        self.blocks = [Block(width, heads, layers, f"block{number}") for number in range(layers)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")

    def call(self, tokens):
        """[batch, time] to logits [batch, time, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.logits(self.norm(x))


def make_model(settings: Settings) -> keras.Model:
    """The model, built, and compiled as a user of Keras does it."""
    sizes = settings.sizes
    if settings.model == "convnet":
        model = convnet(keras, sizes)
    else:
        model = GPT(sizes)
        model(ops.zeros([sizes["batch"], sizes["tokens"]], "int32"))
    model.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def count(model: keras.Model) -> int:
    """How many parameters are trained."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


class Clock(keras.callbacks.Callback):
    """Notes when steps begin, each after the end of the one before.

    Args:
        note: Called at each beginning.
    """

    def __init__(self, note: Callable[[], None]):
        super().__init__()
        self._note = note

    def on_train_batch_begin(self, batch, logs=None):
        """A step begins."""
        self._note()

    def on_train_batch_end(self, batch, logs=None):
        """A step ends: that there is such a method makes Keras wait for its loss."""


def _dense(units: int, name: str, stddev: float = 0.02) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=_normal(stddev), name=name)


def _normal(stddev: float = 0.02) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=stddev)
