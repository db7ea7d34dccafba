"""The private names of Keras that tfdist uses: imported here, and nowhere else.

`strategies/keras_patches/` says which of them are patched. `check_signatures` compares the functions
that are called with what is relied on.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import nn
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.losses import loss as loss_module
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from keras.src.ops.node import Node
from keras.src.ops.operation import Operation
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator, draw_seed
from keras.src.saving import object_registration, saving_lib
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import file_utils
from keras.src.utils.naming import to_snake_case

from tfdist.backend.keras.patching import check_parameters, moved

__all__ = [
    "GLOBAL_SEED_GENERATOR",
    "BaseOptimizer",
    "CompileLoss",
    "CompileMetrics",
    "EpochIterator",
    "Functional",
    "GeneratorDataAdapter",
    "LossFunctionWrapper",
    "LossScaleOptimizer",
    "Node",
    "Operation",
    "PyDatasetAdapter",
    "SeedGenerator",
    "TFEpochIterator",
    "TFOptimizer",
    "TensorFlowTrainer",
    "all_layers",
    "check_signatures",
    "draw_seed",
    "get_keras_mask",
    "global_state",
    "object_registration",
    "h5_dataset",
    "file_utils",
    "in_stateless_scope",
    "loss_module",
    "nn",
    "saving_lib",
    "set_keras_mask",
    "to_snake_case",
]

#: The name of the global generator. Keras 3.12 has it in its code alone, `check_signatures` looks.
GLOBAL_SEED_GENERATOR = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")


def h5_dataset(store: saving_lib.H5IOStore, group: Any, key: str) -> Any:
    """A data set of a file of weights, which Keras has checked: it holds no link to another file.

    Raises:
        KeyError: The group has none of this name.
        ValueError: It is no data set, or a link.
    """
    # Keras 3.13 has not what 3.12.3 and 3.14 have; its stores check what they were given.
    if hasattr(saving_lib, "safe_get_h5_dataset"):
        return saving_lib.safe_get_h5_dataset(group, key)
    return store._verify_dataset(group[key])


def all_layers(model: keras.Layer, **options) -> list[keras.Layer]:
    """A model or layer, and the layers in it and in these."""
    return model._flatten_layers(**options)


#: Functions that are called, or overridden on an instance, and their first parameters.
_CALLED = (
    (keras.Layer, "_flatten_layers", ("self", "include_self", "recursive")),
    (Functional, "_standardize_inputs", ("self", "inputs")),
    (Node, "__init__", ("self", "operation", "call_args", "call_kwargs", "outputs")),
    (keras.Variable, "_initialize", ("self", "value")),
    (keras.Variable, "_direct_assign", ("self", "value")),
    (keras.Variable, "_maybe_autocast", ("self", "value")),
    (TFEpochIterator, "_get_iterator", ("self",)),
    (EpochIterator, "_enumerate_iterator", ("self",)),
    (TensorFlowTrainer, "_assert_compile_called", ("self",)),
    (global_state, "get_global_attribute", ("name",)),
    (seed_generator, "draw_seed", ("seed",)),
    (saving_lib.H5IOStore, "__getitem__", ("self", "key")),
    (loss_module, "apply_mask", ("sample_weight", "mask", "dtype", "reduction")),
)


def check_signatures() -> None:
    """Compares Keras' functions with what tfdist relies on; raises ImportError if one has moved."""
    for called in _CALLED:
        check_parameters(*called)
    if not hasattr(saving_lib, "safe_get_h5_dataset"):
        check_parameters(saving_lib.H5IOStore, "_verify_dataset", ("self", "dataset"))
    if not hasattr(seed_generator, "GLOBAL_SEED_GENERATOR"):
        code = seed_generator.global_seed_generator.__code__
        if GLOBAL_SEED_GENERATOR not in code.co_consts:
            raise moved("seed_generator.GLOBAL_SEED_GENERATOR", "nothing")
