"""tfdist: data, tensor, pipeline, expert and context parallelism and ZeRO for Keras 3 on TensorFlow.

```python
import keras, tfdist

strategy = tfdist.strategies.auto()
with strategy.scope():
    model = keras.Sequential([...])
    model.compile("adam", "sparse_categorical_crossentropy")
model.fit(x, y, batch_size=256, epochs=3)
```
"""

import importlib
from typing import TYPE_CHECKING, Any

import wrapt

from tfdist._version import __version__
from tfdist.mesh import Axis, Mesh
from tfdist.utils.errors import TfdistError

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.hub import load_preset as load_preset
    from tfdist.tensor_parallel import parallelize as parallelize

_ROOMS = (
    "callbacks",
    "checkpoint",
    "collectives",
    "compat",
    "compression",
    "datasets",
    "extend",
    "hub",
    "layers",
    "learning_rate",
    "losses",
    "models",
    "monitoring",
    "optimizers",
    "pipeline",
    "planner",
    "recompute",
    "sharding",
    "strategies",
    "tensor_parallel",
    "testing",
)
#: Functions that stand beside the rooms, by the room that has them.
_FUNCTIONS = {"load_preset": "hub", "parallelize": "tensor_parallel"}

__all__ = ["Axis", "Mesh", "TfdistError", "__version__", *_FUNCTIONS, *_ROOMS]


def __getattr__(name: str) -> Any:
    # `import tfdist` costs nothing; TensorFlow is imported with the first room that needs it.
    if name in _ROOMS:
        return importlib.import_module(f"tfdist.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"tfdist.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _watch_names(keras: Any) -> None:
    """Which layers the user named is only known of those that are made from now on."""
    if keras.config.backend() == "tensorflow":
        importlib.import_module("tfdist.backend.keras.layer_names")


# Keras itself may be imported later.
wrapt.register_post_import_hook(_watch_names, "keras")


def __dir__() -> list[str]:
    return sorted(__all__)
