"""Horovod's Keras callbacks for Keras 3: the same names and arguments, without Horovod.

A script for Horovod changes `hvd.callbacks` to `tfdist.addons.compat.horovod` and creates its model under a
strategy, whose `num_replicas_in_sync` replaces `hvd.size()`. New scripts need none of these: a tfdist
strategy starts all ranks from the same weights and passes global metrics to callbacks, and
`tfdist.learning_rate.ScaledWarmup` warms up the rate.

Under TensorFlow's own strategies, `BroadcastGlobalVariablesCallback` and `MetricAverageCallback` do
nothing, and the others work as usual.
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

#: Names that scripts for Horovod use, and their replacements.
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
    instead = f" Replace hvd.{name} with {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
    raise AttributeError(
        f"{name!r} was not found: tfdist.addons.compat.horovod has only Horovod's callbacks for "
        f"Keras.{instead} "
        "docs/migrate_from_horovod.md lists Horovod's names and their replacements."
    )
