"""Pipeline parallelism: a chain of layers cut into stages, schedules, and a model that runs them.

`PipelineModel` is what most programs need. `deferred_weights` lets a model that is too large for
one rank be built on all; `make_partition` and `make_schedule` show what a cut and a schedule would
be.
"""

from tfdist.pipeline.chain import Chain
from tfdist.pipeline.keras_graph import deferred_weights
from tfdist.pipeline.model import PipelineModel
from tfdist.pipeline.partition import make_partition
from tfdist.pipeline.schedules import SCHEDULES, make_schedule

__all__ = [
    "SCHEDULES",
    "Chain",
    "PipelineModel",
    "deferred_weights",
    "make_partition",
    "make_schedule",
]
