"""One kernel where Keras 3 computes in many steps, each of which reads all memory anew.

They compute what Keras does, up to rounding; on the CPU a step of a small ConvNet takes a fifth less
time with them.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.context import current_replica
from tfdist.keras_internals.patching import Patch
from tfdist.native import has_kernels, load
from tfdist.zero.update import LocalShard

__all__ = ["PATCHES"]

_OWN_DTYPES = (tf.float32, tf.float64)


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
    parameter, *moments = values
    dtype = parameter.dtype
    is_part = isinstance(parameter, LocalShard) and dtype in _OWN_DTYPES and has_kernels()
    if not is_part and not isinstance(parameter, tf.Variable):
        return original(self, gradient, variable, learning_rate)
    m, v = (moment.handle for moment in moments)
    step = tf.cast(self.iterations + 1, dtype)
    betas = [tf.constant(beta, dtype) for beta in (self.beta_1, self.beta_2)]
    powers = [tf.pow(beta, step) for beta in betas]
    rate, epsilon = tf.cast(learning_rate, dtype), tf.constant(self.epsilon, dtype)
    gradient = tf.cast(gradient, dtype)
    if is_part:
        # ZeRO's view of this rank's part of a parameter is no variable, which TensorFlow's kernel wants.
        updated = load().tfdist_adam(
            part=parameter.value,
            m=m,
            v=v,
            gradient=gradient,
            rate=rate * tf.sqrt(1 - powers[1]) / (1 - powers[0]),
            beta_1=betas[0],
            beta_2=betas[1],
            epsilon=epsilon,
        )
        parameter.assign(updated)
    else:
        tf.raw_ops.ResourceApplyAdam(
            var=parameter.handle,
            m=m,
            v=v,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            epsilon=epsilon,
            grad=gradient,
        )
    return None


def _normalize(original, self, inputs, training=None, mask=None):
    """BatchNormalization of images over this rank's own rows."""
    replica = current_replica()
    if replica is None or not (training and self.trainable) or mask is not None or self.renorm:
        return original(self, inputs, training=training, mask=mask)
    spreads = self.synchronized and replica.gradient_group.size > 1
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


PATCHES = (
    Patch(
        keras.optimizers.Adam,
        "update_step",
        ("self", "gradient", "variable", "learning_rate"),
        _adam_step,
    ),
    Patch(
        keras.layers.BatchNormalization,
        "call",
        ("self", "inputs", "training", "mask"),
        _normalize,
    ),
)
