"""Horovod's Keras callbacks for Keras 3: same names, same arguments, no Horovod needed.

A script that comes from Horovod changes `hvd.callbacks` to `tfdist.compat.horovod` and makes its model
under a strategy, whose `num_replicas_in_sync` takes the place of `hvd.size()`. A script that is
new needs none of these: a tfdist strategy starts all ranks from the same weights and hands global
metrics to callbacks, and `tfdist.learning_rate.ScaledWarmup` warms the rate up.

Under a strategy of TensorFlow's own, `BroadcastGlobalVariablesCallback` and
`MetricAverageCallback` do nothing, and the others work as everywhere.
"""

from tfdist.compat.horovod.best_model import BestModelCheckpoint
from tfdist.compat.horovod.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tfdist.compat.horovod.ranks import BroadcastGlobalVariablesCallback, MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
