"""LoRA adapters of KerasHub: which variables they are, and training them alone."""

from __future__ import annotations

import keras

from tfdist.utils import checks


def is_adapter(variable: keras.Variable) -> bool:
    """Whether a variable is a matrix of an adapter that Keras' `enable_lora` has added."""
    return variable.name.startswith("lora_")


def train_only_adapters(model: keras.Model) -> None:
    """Freezes all weights of a model except its LoRA adapters.

    `enable_lora` of KerasHub leaves the biases of the adapted layers trainable, which neither its adapter files nor
    those of PEFT contain as such. Call this after `enable_lora` and before `compile`.

    Args:
        model: A backbone or task of KerasHub.

    Raises:
        ValueError: The model has no adapters.
    """
    checks.instance("model", model, keras.Model, "a model")
    variables = model.trainable_variables
    if not any(map(is_adapter, variables)):
        raise ValueError(
            f"`model` must have LoRA adapters. Received: `{model.name}` without any. Call `enable_lora` first."
        )
    for variable in variables:
        variable.trainable = is_adapter(variable)
