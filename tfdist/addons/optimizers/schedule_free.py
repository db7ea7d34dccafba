"""Schedule-free AdamW on slices and shards."""

from __future__ import annotations

import keras

from tfdist.sharding.layout import layout_of


@keras.saving.register_keras_serializable(package="tfdist")
class ScheduleFreeAdamW(keras.optimizers.ScheduleFreeAdamW):
    """`keras.optimizers.ScheduleFreeAdamW` for tensor parallelism and ZeRO.

    Arguments and updates are those of Keras.

    Source: Defazio et al., "The Road Less Scheduled" (https://arxiv.org/abs/2405.15682).
    """

    #: Each entry depends on its own gradient, state and weight.
    elementwise = True

    def assign(self, variable, value):
        """Assigns; of a whole parameter, as Keras' `build` does to its average, the own shard."""
        shard = layout_of(variable).flat
        if shard is not None and tuple(value.shape) == shard.array_shape != tuple(variable.shape):
            value = shard.local_shard(value)
        super().assign(variable, value)
