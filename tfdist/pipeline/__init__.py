"""Pipeline parallelism: a chain of layers cut into stages, schedules, and a model that runs them.

`PipelineModel` is what most programs need. `deferred_weights` lets a model that is too large for
one rank be built on all; `make_schedule` shows what a schedule would be.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.pipeline.schedules import make_schedule

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.backend.keras.functional import deferred_weights
    from tfdist.pipeline.model import PipelineModel as PipelineModel

#: What needs TensorFlow: schedules are of use without.
_HOMES = {
    "PipelineModel": "tfdist.pipeline.model",
    "deferred_weights": "tfdist.backend.keras.functional",
}

__all__ = ["make_schedule", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
