"""One kernel of TensorFlow where Keras 3 computes in many steps, each of which reads all memory anew.

Both compute what Keras does, up to rounding; on the CPU a step of a small ConvNet takes a fifth less
time with them.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.strategies.keras_seam.wrapping import Wrapper
from tfdist.strategies.replica import current_replica

__all__ = ["WRAPPERS"]


def _adam_step(original, self, gradient, variable, learning_rate):
    """Adam and AdamW, for dense gradients."""
    is_ours = hasattr(tf.distribute.get_strategy(), "zero_stage")
    if not is_ours or self.amsgrad or not isinstance(gradient, tf.Tensor):
        return original(self, gradient, variable, learning_rate)
    index = self._get_variable_index(variable)
    values = [
        each.value if isinstance(each, keras.Variable) else each
        for each in (variable, self._momentums[index], self._velocities[index])
    ]
    # Under ZeRO it is a view of this rank's part, which has no memory of its own.
    if not all(isinstance(value, tf.Variable) for value in values):
        return original(self, gradient, variable, learning_rate)
    dtype = values[0].dtype
    step = tf.cast(self.iterations + 1, dtype)
    betas = [tf.constant(beta, dtype) for beta in (self.beta_1, self.beta_2)]
    var, m, v = (value.handle for value in values)
    tf.raw_ops.ResourceApplyAdam(
        var=var,
        m=m,
        v=v,
        beta1_power=tf.pow(betas[0], step),
        beta2_power=tf.pow(betas[1], step),
        lr=tf.cast(learning_rate, dtype),
        beta1=betas[0],
        beta2=betas[1],
        epsilon=tf.constant(self.epsilon, dtype),
        grad=tf.cast(gradient, dtype),
    )
    return None


def _normalize(original, self, inputs, training=None, mask=None):
    """BatchNormalization of images over this rank's own rows."""
    replica = current_replica()
    if replica is None or not (training and self.trainable) or mask is not None or self.renorm:
        return original(self, inputs, training=training, mask=mask)
    spreads = self.synchronized and replica.strategy.group("data").size > 1
    if spreads or inputs.shape.rank != 4 or self.axis not in (-1, 3):
        return original(self, inputs, training=training, mask=mask)
    dtype = keras.backend.result_type(inputs.dtype, "float32")
    if dtype != "float32":
        return original(self, inputs, training=training, mask=mask)
    channels = inputs.shape[3]
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=tf.cast(inputs, dtype),
        scale=tf.cast(self.gamma, dtype) if self.scale else tf.ones([channels]),
        offset=tf.cast(self.beta, dtype) if self.center else tf.zeros([channels]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=True,
    )
    # The kernel's is that of the population, as estimated from this sample; Keras keeps the sample's.
    count = tf.cast(tf.size(inputs) // channels, dtype)
    variance *= (count - 1) / count
    for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
        old = tf.cast(moving, dtype)
        moving.assign(old * self.momentum + new * (1.0 - self.momentum))
    return tf.cast(outputs, self.compute_dtype)


WRAPPERS = (
    Wrapper(
        keras.optimizers.Adam,
        "update_step",
        ("self", "gradient", "variable", "learning_rate"),
        _adam_step,
    ),
    Wrapper(
        keras.layers.BatchNormalization,
        "call",
        ("self", "inputs", "training", "mask"),
        _normalize,
    ),
)
