"""Patches of KerasHub: files of split models, balance losses of experts, and generation on ranks.

KerasHub need not be installed, and may be imported late: its methods are wrapped when the first
weights of one of its models are created.
"""

from __future__ import annotations

import functools
import sys

import keras
import tensorflow as tf
from absl import logging

from tfdist.addons.hub.adapters import is_adapter
from tfdist.addons.hub.exporting import exporting_patches
from tfdist.addons.hub.generating import generate_alike
from tfdist.backend.keras.patching import Patch, apply_patches
from tfdist.backend.keras.private import all_layers, saving_lib
from tfdist.step.context import current_replica
from tfdist.strategies.keras_patches.reading import reading_parts
from tfdist.strategies.keras_patches.saving import write_once, write_some_once
from tfdist.strategies.keras_patches.splits import split_variables
from tfdist.tensor_parallel.attributes import variables_of_layer

#: The backbones whose decoders add a balance loss; releases of KerasHub lack some.
_WITH_BALANCE_LOSSES = (
    "MixtralBackbone",
    "QwenMoeBackbone",
    "Qwen3MoeBackbone",
    "Qwen3_5MoeBackbone",
)


#: The group, in a file of adapters, of other trained weights; KerasHub ignores it.
_BESIDE = "tfdist"


def _save_adapter(self, filepath, *, original):
    """Gathers only the adapter on the chief, not the whole model.

    KerasHub does not save other trained weights: the biases, which its `enable_lora` keeps trainable,
    or any that a program makes trainable.
    """
    trained = {id(variable) for variable in self.trainable_variables}
    beside = [
        (place, variable)
        for place, layer in enumerate(_layers_of_adapters(self))
        for variable in variables_of_layer(layer)
        if id(variable) in trained and not is_adapter(variable)
    ]
    wanted = {id(variable) for _, variable in beside}
    some = [
        (variable, layout)
        for variable, layout in split_variables(self)
        if is_adapter(variable) or id(variable) in wanted
    ]

    @functools.wraps(original)
    def write(self, filepath):
        original(self, filepath)
        if not beside:
            return
        import h5py

        with h5py.File(filepath, "a") as file:
            for place, variable in beside:
                value = keras.ops.convert_to_numpy(variable.value)
                # HDF5 has no bfloat16.
                value = value if value.dtype.kind == "f" else value.astype("float32")
                file[f"{_BESIDE}/{place}/vars/{variable.name}"] = value
        logging.warning(
            "tfdist: %s includes %d weights in addition to the adapter, such as `%s`, because they were "
            "trained. tfdist reads them, but plain KerasHub does not.",
            filepath,
            len(beside),
            beside[0][1].path,
        )

    return write_some_once(write, self, some, filepath)


def _layers_of_adapters(backbone) -> list:
    """The layers whose places are the names of adapters in KerasHub's files."""
    return [layer for layer in all_layers(backbone, include_self=False) if layer.weights]


def _read_beside(backbone, filepath) -> None:
    """Assigns the additional weights of a file of adapters."""
    import h5py

    with h5py.File(filepath, "r") as file:
        places = {place: list(file[_BESIDE][place]["vars"]) for place in file.get(_BESIDE, ())}
    if not places:
        return
    layers = _layers_of_adapters(backbone)
    store = saving_lib.H5IOStore(filepath, mode="r")
    for place, names in places.items():
        layer = layers[int(place)] if int(place) < len(layers) else None
        own = {} if layer is None else {v.name: v for v in variables_of_layer(layer)}
        for name in names:
            if name not in own:
                raise ValueError(
                    "An adapter must belong to the model that loads it. Received: "
                    f"{str(filepath)!r}, with a `{name}` of layer {place} that `{backbone.name}` lacks."
                )
            own[name].assign(store.get(f"{_BESIDE}/{place}")[name])
    store.close()


def _load_adapter(self, filepath, *, original):
    """Reads this rank's parts of an adapter, after its layers have been given LoRA."""
    if not getattr(self, "_lora_enabled_layers", None):
        # `load_lora_weights` would do this itself, but before its variables can be read in parts.
        import h5py

        with h5py.File(filepath, "r") as file:
            self.enable_lora(int(file["lora/vars/rank"][()]))
    with reading_parts(self):
        original(self, filepath)
        _read_beside(self, filepath)


def _balance(router_logits, num_experts, top_k, attention_mask=None, *, original):
    """The balance loss of a layer of experts, over the tokens of all ranks.

    It is a product of two means over tokens, so it differs from the mean of the ranks' losses.
    """
    replica = current_replica()
    if replica is None or replica.strategy.row_group.size == 1:
        return original(router_logits, num_experts, top_k, attention_mask)
    if attention_mask is not None:
        if len(attention_mask.shape) == 3:
            # Only whether a token attends to any other matters.
            attention_mask = tf.reduce_any(tf.cast(attention_mask, "bool"), axis=-1, keepdims=True)
        attention_mask = replica.all_gather(attention_mask, axis=0)
    router_logits = replica.all_gather(router_logits, axis=0)
    return original(router_logits, num_experts, top_k, attention_mask)


def patches_of(models) -> tuple[Patch, ...]:
    """The patches of KerasHub, where `models` is `keras_hub.models`."""
    # The function is private, and each family of experts has its own.
    decoders = [
        sys.modules[cls.__module__.replace("_backbone", "_decoder")]
        for name in _WITH_BALANCE_LOSSES
        if (cls := getattr(models, name, None)) is not None
    ]
    balance = [
        Patch(
            module,
            "compute_load_balancing_loss",
            ("router_logits", "num_experts", "top_k", "attention_mask"),
            _balance,
        )
        for module in decoders
    ]
    return (
        *balance,
        *exporting_patches(models),
        Patch(models.Backbone, "save_lora_weights", ("self", "filepath"), _save_adapter),
        Patch(models.Backbone, "load_lora_weights", ("self", "filepath"), _load_adapter),
        Patch(models.Backbone, "save_to_preset", ("self", "preset_dir"), write_once),
        Patch(models.Task, "save_to_preset", ("self", "preset_dir"), write_once),
        Patch(models.CausalLM, "generate", ("self", "inputs", "max_length"), generate_alike),
    )


def install_hub() -> None:
    """Patches KerasHub if it is imported; later calls have no effect."""
    models = getattr(sys.modules.get("keras_hub"), "models", None)
    if models is not None:
        _install(models)


@functools.cache
def _install(models) -> None:
    apply_patches(patches_of(models))
