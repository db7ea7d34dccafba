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
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.hub import load_preset as load_preset
    from tfdist.tensor_parallel import parallelize as parallelize

#: `import tfdist` costs nothing; TensorFlow is imported with the first room that needs it.
_HOMES = {
    "load_preset": "tfdist.addons.hub",
    "parallelize": "tfdist.tensor_parallel",
    **{
        room: f"tfdist.{room}"
        for room in (
            "addons",
            "callbacks",
            "checkpoint",
            "collectives",
            "experts",
            "extend",
            "layers",
            "learning_rate",
            "losses",
            "models",
            "pipeline",
            "recompute",
            "sharding",
            "strategies",
            "tensor_parallel",
            "testing",
        )
    },
}

__all__ = ["Axis", "Mesh", "TfdistError", "__version__", *_HOMES]
__getattr__, _ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)


def _watch_names(keras: Any) -> None:
    """Which layers the user named is only known of those that are made from now on."""
    if keras.config.backend() == "tensorflow":
        importlib.import_module("tfdist.backend.keras.layer_names")


# Keras itself may be imported later.
wrapt.register_post_import_hook(_watch_names, "keras")
