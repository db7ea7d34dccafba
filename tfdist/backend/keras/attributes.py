"""Private attributes of Keras' objects, each under a name of tfdist and with a check.

They are used because Keras has no equivalent public attributes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from tfdist.backend.keras.patching import moved
from tfdist.backend.keras.private import (
    BaseOptimizer,
    EpochIterator,
    LossFunctionWrapper,
    Node,
    Operation,
    TensorFlowTrainer,
    TFEpochIterator,
    nn,
)


class Attribute:
    """An attribute of Keras' objects: called with an object, it returns the value.

    Args:
        name: Keras' name of the attribute.
        *owners: The classes or modules whose code uses it.
        since: The first version of Keras that has it; objects of older versions do not.
        before: The first version that lacks it again.

    Attributes:
        is_known: Whether this version of Keras has it.

    Raises:
        ImportError: An owner does not use it.
    """

    def __init__(self, name: str, *owners: Any, since=(3, 0), before=(4, 0)):
        self.name, self.owners = name, owners
        self.is_known = since <= tuple(map(int, keras.__version__.split(".")[:2])) < before
        if not self.is_known:
            return
        for owner in owners:
            if name not in _names_in(owner):
                raise moved(f"{owner.__name__}.{name}", "nothing")

    def __call__(self, thing, *default):
        """The value of an object, or the default if the object does not have the attribute."""
        return getattr(thing, self.name, *default)

    def set(self, thing, value) -> None:
        """Sets the value of an object."""
        setattr(thing, self.name, value)


@functools.cache
def _names_in(owner) -> frozenset[str]:
    """The names that a module, or a class of Keras with its base classes, defines or uses."""
    parts = [
        part
        for each in getattr(owner, "__mro__", (owner,))
        if getattr(each, "__module__", each.__name__).startswith("keras.")
        for part in vars(each).items()
    ]
    functions = [inspect.unwrap(part) for _, part in parts if inspect.isfunction(part)]
    mentioned = [name for function in functions for name in function.__code__.co_names]
    return frozenset([*(name for name, _ in parts), *mentioned])


# Of variables. The storage: `value` autocasts, and gathers the shards of ZeRO-3.
stored_value = Attribute("_value", keras.Variable)
# Without mixed precision, which changes `dtype`; and the method that casts.
stored_dtype = Attribute("_dtype", keras.Variable)
autocast = Attribute("_maybe_autocast", keras.Variable)
# Settable, for a variable that is reduced to a slice.
stored_shape = Attribute("_shape", keras.Variable)

# Of layers. Without sublayers, whose variables the public lists contain.
own_non_trainable = Attribute("_non_trainable_variables", keras.Layer)
sublayers = Attribute("_layers", keras.Layer)
# A method. `losses` includes those of sublayers, and regularizers.
own_losses = Attribute("_get_own_losses", keras.Layer)
# The variables: `kernel` and `embeddings` add the update of LoRA, and unpack quantized ones.
_PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)
kernel_of = Attribute("_kernel", *_PRODUCTS)
table_of = Attribute("_embeddings", keras.layers.Embedding)
attention_core = Attribute(
    "_compute_attention", keras.layers.GroupQueryAttention, keras.layers.MultiHeadAttention
)

# Of tensors. The call that created a symbolic one, and the logits set by an activation.
history = Attribute("_keras_history", Node)
# Of operations, to which the history points.
inbound_nodes = Attribute("_inbound_nodes", Operation)
keras_logits = Attribute("_keras_logits", nn)

# Of losses and metrics of functions: the function and its arguments.
loss_arguments = Attribute("_fn_kwargs", LossFunctionWrapper)
metric_arguments = Attribute("_fn_kwargs", keras.metrics.MeanMetricWrapper)
metric_function = Attribute("_fn", keras.metrics.MeanMetricWrapper)

# Of models. `compute_loss` adds the layers' losses, and `compute_metrics` reads all metrics.
compile_loss = Attribute("_compile_loss", TensorFlowTrainer)
compile_metrics = Attribute("_compile_metrics", TensorFlowTrainer)
loss_tracker = Attribute("_loss_tracker", TensorFlowTrainer)
model_strategy = Attribute("_distribute_strategy", TensorFlowTrainer)
# A method. `metrics` goes through the layers too.
own_metrics = Attribute("_get_own_metrics", TensorFlowTrainer)
# The first epoch of `fit`, as set by Keras' BackupAndRestore.
initial_epoch = Attribute("_initial_epoch", TensorFlowTrainer)

# Of optimizers. Without the variables of an inner optimizer.
own_variables = Attribute("_variables", BaseOptimizer)
accumulators = Attribute("_accumulated_gradients", BaseOptimizer)
# A method: the index of the optimizer's variables for a parameter, or for its TensorFlow variable.
place_of = Attribute("_get_variable_index", BaseOptimizer)
# `iterations` only counts updates if gradients are accumulated.
micro_steps = Attribute("_iterations", BaseOptimizer)
momentums = Attribute("_momentums", keras.optimizers.RMSprop, keras.optimizers.Adam)

# Of ModelCheckpoint, for a `fit` that resumes.
batches_since_save = Attribute("_batches_seen_since_last_saving", keras.callbacks.ModelCheckpoint)
last_batch = Attribute("_last_batch_seen", keras.callbacks.ModelCheckpoint)
# Of SwapEMAWeights, whose averages are in the model between two epochs.
averages_in_model = Attribute("_ema_weights_in_model", keras.callbacks.SwapEMAWeights)

# Of Keras' loop over batches, for a `fit` that resumes. `num_batches` is `steps_per_epoch` at first.
current_iterator = Attribute("_current_iterator", EpochIterator)
num_batches = Attribute("_num_batches", EpochIterator)
steps_seen = Attribute("_steps_seen", EpochIterator)
get_iterator = Attribute("_get_iterator", TFEpochIterator)
distributed_dataset = Attribute("_distributed_dataset", TFEpochIterator)
data_strategy = Attribute("_distribute_strategy", TFEpochIterator)


def loss_variables(model) -> set[int]:
    """The ids of the variables of a model's loss metric; none before `compile`."""
    return {id(variable) for variable in getattr(loss_tracker(model, None), "variables", ())}


def count_batch(model, y, y_pred, sample_weight, rows):
    """Computes the loss of `compile`, and updates the loss metric and the metrics without reading them."""
    # Without a loss there may be those of layers.
    compute = compile_loss(model) or (lambda *_: keras.ops.zeros(()))
    loss = compute(y, y_pred, sample_weight)
    loss_tracker(model).update_state(loss, sample_weight=rows)
    if compile_metrics(model) is not None:
        compile_metrics(model).update_state(y, y_pred, sample_weight)
    return loss
