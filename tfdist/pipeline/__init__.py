"""Pipeline parallelism: a chain of layers split into stages, schedules, and a model that runs them.

`PipelineModel` is what most programs need. `deferred_weights` lets a model that is too large for
one rank be built on all; `make_schedule` shows what a schedule would be.
"""

from typing import TYPE_CHECKING

from tfdist.pipeline.schedules import make_schedule
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.backend.keras.functional import deferred_weights as deferred_weights
    from tfdist.pipeline.model import PipelineModel as PipelineModel

#: What needs TensorFlow: schedules are of use without.
_HOMES = {
    "PipelineModel": "tfdist.pipeline.model",
    "deferred_weights": "tfdist.backend.keras.functional",
}

__all__ = ["make_schedule", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
