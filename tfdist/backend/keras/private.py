"""The private names of Keras that tfdist uses, which are imported only here.

`strategies/keras_patches/` patches some of them. `check_signatures` checks the functions that are called.
"""

# ruff: noqa: F401  Other modules import these names from here.

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
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

try:
    from keras.src.backend.tensorflow.ops import nn
    from keras.src.backend.tensorflow.trainer import Trainer as TensorFlowTrainer
except ImportError:  # Before Keras 3.16.
    from keras.src.backend.tensorflow import nn
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
#: The name of the global generator. In Keras 3.12 it is a constant in code; see `check_signatures`.
GLOBAL_SEED_GENERATOR = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")


def h5_dataset(store: saving_lib.H5IOStore, group: Any, key: str) -> Any:
    """A dataset of a file of weights, checked by Keras: it has no link to another file.

    Raises:
        KeyError: The group has no dataset of this name.
        ValueError: It is not a dataset, or it is a link.
    """
    # Keras 3.13 lacks the function of 3.12.3 and 3.14; its stores check their datasets.
    if hasattr(saving_lib, "safe_get_h5_dataset"):
        return saving_lib.safe_get_h5_dataset(group, key)
    return store._verify_dataset(group[key])


def all_layers(model: keras.Layer, **options) -> list[keras.Layer]:
    """A model or layer, and all of its sublayers, recursively."""
    return model._flatten_layers(**options)


def copy_keras_masks(before: Any, after: Any) -> None:
    """Gives tensors of a nest the masks of those of another one."""
    for old, new in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=True):
        mask = get_keras_mask(old)
        if new is not old and mask is not None:
            set_keras_mask(new, mask)


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
    """Checks the signatures of Keras' functions; raises ImportError if one has changed."""
    for called in _CALLED:
        check_parameters(*called)
    if not hasattr(saving_lib, "safe_get_h5_dataset"):
        check_parameters(saving_lib.H5IOStore, "_verify_dataset", ("self", "dataset"))
    if not hasattr(seed_generator, "GLOBAL_SEED_GENERATOR"):
        code = seed_generator.global_seed_generator.__code__
        if GLOBAL_SEED_GENERATOR not in code.co_consts:
            raise moved("seed_generator.GLOBAL_SEED_GENERATOR", "nothing")
