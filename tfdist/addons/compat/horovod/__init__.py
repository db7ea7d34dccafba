"""Horovod's Keras callbacks for Keras 3: same names, same arguments, no Horovod needed.

A script that comes from Horovod changes `hvd.callbacks` to `tfdist.addons.compat.horovod` and makes its model
under a strategy, whose `num_replicas_in_sync` takes the place of `hvd.size()`. A script that is
new needs none of these: a tfdist strategy starts all ranks from the same weights and hands global
metrics to callbacks, and `tfdist.learning_rate.ScaledWarmup` warms the rate up.

Under a strategy of TensorFlow's own, `BroadcastGlobalVariablesCallback` and
`MetricAverageCallback` do nothing, and the others work as everywhere.
"""

from typing import NoReturn

from tfdist.addons.compat.horovod.best_model import BestModelCheckpoint
from tfdist.addons.compat.horovod.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tfdist.addons.compat.horovod.ranks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

#: What a script of Horovod's looks for here, and what takes its place.
_ELSEWHERE = {
    "init": "strategy = tfdist.strategies.HorovodStrategy()",
    "rank": "strategy.mesh.rank",
    "size": "strategy.mesh.size",
    "local_rank": "the variable HOROVOD_LOCAL_RANK",
    "callbacks": "tfdist.addons.compat.horovod itself",
    "DistributedOptimizer": "the optimizer itself",
    "DistributedGradientTape": "tf.GradientTape in a train_step",
    "broadcast_variables": "nothing: fit does it",
    "allreduce": "tfdist.collectives.all_reduce",
    "allgather": "tfdist.collectives.all_gather",
    "broadcast": "tfdist.collectives.broadcast",
    "alltoall": "tfdist.collectives.all_to_all",
}


def __getattr__(name: str) -> NoReturn:
    instead = f" In the place of hvd.{name}: {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
    raise AttributeError(
        f"tfdist.addons.compat.horovod has Horovod's callbacks for Keras alone. Received: {name!r}.{instead} "
        "docs/migrate_from_horovod.md lists Horovod's names, and what to write for each."
    )
