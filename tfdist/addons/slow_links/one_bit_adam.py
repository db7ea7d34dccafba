"""1-bit Adam: AdamW whose momentum is sent compressed."""

from __future__ import annotations

import keras
from keras import ops

from tfdist.addons.slow_links.momentum import CompressedMomentum
from tfdist.backend.keras.attributes import Attribute, momentums, place_of
from tfdist.utils import checks

_MOST_STEPS = 1 << 40
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")

# Private to Keras, checked here.
_velocities = Attribute("_velocities", keras.optimizers.Adam)


@keras.saving.register_keras_serializable(package="tfdist")
class OneBitAdam(keras.optimizers.AdamW, CompressedMomentum):
    """AdamW for compressed gradients, such as those of `tfdist.addons.slow_links.OneBit`.

    Error feedback sends delayed gradients in larger parts, which increase Adam's second moments v like
    noise. So v is frozen after `freeze_step` steps, and the update becomes linear in the gradients.
    From then on each rank compresses its momentum in place of its gradient g, in units of the update:

        u = (beta_1 m + (1 - beta_1) g) / (sqrt(v) + epsilon)

    With the mean of what ranks have sent, m = (sqrt(v) + epsilon) mean(u). A momentum is smoother than
    a gradient, and in these units all entries of a block have a similar size.

    ```python
    strategy = tfdist.strategies.auto(compression=tfdist.addons.slow_links.OneBit(start_step=1000))
    with strategy.scope():
        model.compile(tfdist.addons.slow_links.OneBitAdam(3e-4, freeze_step=1000), loss)
    ```

    Gradients that are not compressed, such as small ones, update the momentum as usual.

    Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed", arXiv:2102.02888, which compresses m without these units.

    Args:
        learning_rate: The learning rate, or a schedule.
        freeze_step: The number of updates after which v is frozen: a tenth to a fifth of the training,
            and not before the learning rate is at its highest. At most the compressor's `start_step`.
        **kwargs: Those of `keras.optimizers.AdamW`, such as `weight_decay`, except for clipping and
            `amsgrad`: gradients are compressed before they could be clipped.

    Raises:
        TypeError: `learning_rate` is neither a number nor a schedule.
        ValueError: An argument is out of range, or not supported.
    """

    #: The update is elementwise, so that tensor parallel ranks may have slices.
    elementwise = True

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.001,
        freeze_step: int = 1000,
        **kwargs,
    ):
        schedule = keras.optimizers.schedules.LearningRateSchedule
        if not isinstance(learning_rate, schedule):
            checks.number("learning_rate", learning_rate, minimum=0)
        checks.integer("freeze_step", freeze_step, minimum=1, maximum=_MOST_STEPS)
        if "beta_1" in kwargs:
            checks.number("beta_1", kwargs["beta_1"], above=0, below=1)
        for name in (*_CLIPPING, "amsgrad"):
            if kwargs.get(name):
                raise ValueError(
                    "OneBitAdam does not support clipping or amsgrad: gradients are compressed before they "
                    f"could be clipped. Received: {name}={checks.shown(kwargs[name])}. Remove it."
                )
        super().__init__(learning_rate, **kwargs)
        self.freeze_step = freeze_step

    def update_step(self, gradient, variable, learning_rate):
        """Adam's update, with v frozen after the first steps."""
        dtype = variable.dtype
        rate, gradient = ops.cast(learning_rate, dtype), ops.cast(gradient, dtype)
        step = ops.cast(self.iterations + 1, dtype)
        counted = ops.minimum(step, ops.cast(self.freeze_step, dtype))
        momentum, velocity = self._moments(variable)
        decay = ops.power(ops.cast(self.beta_2, dtype), counted)
        alpha = rate * ops.sqrt(1 - decay)
        alpha /= 1 - ops.power(ops.cast(self.beta_1, dtype), step)
        # Functions of Keras, because a gradient may be sparse.
        change = ops.subtract(gradient, momentum)
        self.assign_add(momentum, ops.multiply(change, 1 - self.beta_1))
        # An entry whose first gradient comes after the freeze, as of a rare row, gets its v from that one.
        late = ops.where(ops.convert_to_tensor(velocity) > 0, ops.zeros([], dtype), 1 - decay)
        share = ops.where(step > counted, late, 1 - self.beta_2)
        change = ops.subtract(ops.square(gradient), velocity)
        self.assign_add(velocity, ops.multiply(change, share))
        self.assign_sub(variable, momentum * alpha / (ops.sqrt(velocity) + self.epsilon))

    def to_send(self, gradient, variable):
        """See `CompressedMomentum.to_send`: the momentum, in units of the update."""
        momentum, velocity = self._moments(variable)
        new = self.beta_1 * momentum + (1 - self.beta_1) * ops.cast(gradient, momentum.dtype)
        return new / self._unit(velocity)

    def received(self, mean, variable):
        """See `CompressedMomentum.received`."""
        momentum, velocity = self._moments(variable)
        new = ops.cast(mean, momentum.dtype) * self._unit(velocity)
        return (new - self.beta_1 * momentum) / (1 - self.beta_1)

    def _unit(self, velocity):
        """The divisor of a momentum; where v is still 0, from the mean of its array."""
        found = ops.convert_to_tensor(velocity)
        return ops.sqrt(ops.where(found > 0, found, ops.mean(found))) + self.epsilon

    def _moments(self, variable) -> tuple[keras.Variable, keras.Variable]:
        place = place_of(self)(variable)
        return momentums(self)[place], _velocities(self)[place]

    def get_config(self):
        """The arguments of the constructor."""
        return {**super().get_config(), "freeze_step": self.freeze_step}
