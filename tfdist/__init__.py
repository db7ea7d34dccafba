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

# `import tfdist` is cheap: TensorFlow is imported with the first subpackage that needs it.
_HOMES = {
    "load_preset": "tfdist.addons.hub",
    "parallelize": "tfdist.tensor_parallel",
}
_ROOMS = (
    "addons",
    "callbacks",
    "checkpoint",
    "collectives",
    "experts",
    "extend",
    "layers",
    "learning_rate",
    "models",
    "pipeline",
    "recompute",
    "sharding",
    "strategies",
    "tensor_parallel",
    "testing",
)

__all__ = ["Axis", "Mesh", "TfdistError", "__version__", *_HOMES, *_ROOMS]
__getattr__, _ = lazy_names(__name__, _HOMES, _ROOMS)


def __dir__() -> list[str]:
    return sorted(__all__)


#: The modules of registered classes, which Keras looks up by name when it loads a saved model.
_REGISTERED = {
    "Adafactor": "tfdist.addons.optimizers.adafactor",
    "ColumnParallelDense": "tfdist.layers.dense",
    "DiLoCo": "tfdist.addons.slow_links.local_sgd.diloco",
    "Dropout": "tfdist.layers.dropout",
    "GRPOLoss": "tfdist.addons.hub.preferences.losses",
    "Lamb": "tfdist.addons.optimizers.lamb",
    "LayerNormalization": "tfdist.layers.normalization",
    "LocalSGD": "tfdist.addons.slow_links.local_sgd.local_sgd",
    "MixtureOfExperts": "tfdist.experts.layer",
    "Muon": "tfdist.addons.optimizers.muon",
    "OneBitAdam": "tfdist.addons.slow_links.one_bit_adam",
    "ParallelMLP": "tfdist.layers.feed_forward",
    "ParallelMultiHeadAttention": "tfdist.layers.attention",
    "PositionEmbedding": "tfdist.layers.positions",
    "PreferenceLoss": "tfdist.addons.hub.preferences.losses",
    "RMSNormalization": "tfdist.layers.normalization",
    "RowParallelDense": "tfdist.layers.dense",
    "ScaledWarmup": "tfdist.learning_rate",
    "ScheduleFreeAdamW": "tfdist.addons.optimizers.schedule_free",
    "ShardedEmbedding": "tfdist.addons.recommenders.sharded_embedding.layer",
    "SlowMo": "tfdist.addons.slow_links.local_sgd.slowmo",
    "TransformerDecoderBlock": "tfdist.models.transformer",
    "VocabParallelCrossEntropy": "tfdist.layers.losses",
    "VocabParallelEmbedding": "tfdist.layers.embedding",
    "VocabParallelHead": "tfdist.layers.embedding",
    "_DotInteraction": "tfdist.addons.recommenders.dlrm",
}


def _on_keras(keras: Any) -> None:
    """Prepares Keras for saved models, and starts recording which layers the user names."""
    if keras.config.backend() == "tensorflow":
        importlib.import_module("tfdist.backend.keras.layer_names")
        importlib.import_module("tfdist.backend.keras.registered").find_in(_REGISTERED)


# Keras itself may be imported later.
wrapt.register_post_import_hook(_on_keras, "keras")
