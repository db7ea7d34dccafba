"""GPT written by hand in TensorFlow's operations, without layers: what one device can do.

The same sizes, initial distributions and precision as `tfdist.models.gpt`: pre-norm blocks, fused
QKV, GELU by tanh, learned positions, tied head.
"""

from __future__ import annotations

import math

import keras
import tensorflow as tf


class RawGPT:
    """Weights as plain variables, and one compiled step of training.

    Args:
        vocabulary: The number of tokens.
        num_layers: The number of blocks.
        width: The size of the residual stream.
        heads: The number of heads.
        time: The length of a sequence.
        optimizer: It updates the weights; the same kind as the model's it is compared with.
    """

    def __init__(
        self,
        vocabulary: int,
        num_layers: int,
        width: int,
        heads: int,
        time: int,
        optimizer: keras.optimizers.Optimizer,
    ):
        def normal(*shape, stddev=0.02):
            return keras.Variable(tf.random.normal(shape, stddev=stddev))

        def zeros(*shape):
            return keras.Variable(tf.zeros(shape))

        def ones(*shape):
            return keras.Variable(tf.ones(shape))

        out = 0.02 / math.sqrt(2 * num_layers)
        self.heads, self.size = heads, width // heads
        self.table, self.positions = normal(vocabulary, width), normal(time, width)
        self.blocks = [
            {
                "norm1": (ones(width), zeros(width)),
                "qkv": (normal(width, 3 * width), zeros(3 * width)),
                "out": (normal(width, width, stddev=out), zeros(width)),
                "norm2": (ones(width), zeros(width)),
                "up": (normal(width, 4 * width), zeros(4 * width)),
                "down": (normal(4 * width, width, stddev=out), zeros(width)),
            }
            for _ in range(num_layers)
        ]
        self.final = (ones(width), zeros(width))
        self.variables = [
            self.table,
            self.positions,
            *(v for block in self.blocks for pair in block.values() for v in pair),
            *self.final,
        ]
        self.optimizer = optimizer
        optimizer.build(self.variables)
        self.mask = tf.linalg.band_part(tf.ones([time, time]), -1, 0)

    def loss(self, tokens, labels):
        """The mean cross-entropy of next tokens."""
        batch, time = tokens.shape
        width = self.heads * self.size
        x = tf.gather(self.table.value, tokens) + self.positions.value
        x = tf.reshape(x, [-1, width])
        for block in self.blocks:
            y = _product(_norm(x, block["norm1"]), block["qkv"])
            y = tf.reshape(y, [batch, time, 3, self.heads, self.size])
            query, key, value = tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]))
            scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(self.size)
            weights = tf.nn.softmax(scores - 1e9 * (1 - self.mask))
            y = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
            x += _product(tf.reshape(y, [-1, width]), block["out"])
            y = tf.nn.gelu(_product(_norm(x, block["norm2"]), block["up"]), approximate=True)
            x += _product(y, block["down"])
        logits = tf.matmul(_norm(x, self.final), self.table.value, transpose_b=True)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(labels, [-1]), logits)
        )

    @tf.function
    def step(self, tokens, labels):
        """One update; returns the loss before it."""
        with tf.GradientTape() as tape:
            loss = self.loss(tokens, labels)
        values = [variable.value for variable in self.variables]
        self.optimizer.apply(tape.gradient(loss, values), self.variables)
        return loss


def _product(x, weights):
    kernel, bias = weights
    return tf.nn.bias_add(tf.matmul(x, kernel.value), bias.value)


def _norm(x, weights):
    scale, offset = weights
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset.value, scale.value, 1e-5)
