"""KerasHub's own files, of models whose variables are split: adapters of LoRA, and presets.

KerasHub need not be installed, and may be imported late: its methods are wrapped when the first
weights of one of its models are made.
"""

from __future__ import annotations

import functools
import sys

from tfdist.keras_internals.patching import Patch, apply_patches
from tfdist.strategies.keras_patches.reading import reading_parts
from tfdist.strategies.keras_patches.saving import write_once, write_some_once
from tfdist.strategies.keras_patches.splits import split_variables

__all__ = ["install_hub", "patches_of"]


def _save_adapter(original, self, filepath):
    """The chief gathers the adapter alone, not the model that it is for."""
    adapter = [(v, layout) for v, layout in split_variables(self) if v.name.startswith("lora_")]
    return write_some_once(original, self, adapter, filepath)


def _load_adapter(original, self, filepath):
    """Each rank reads its parts of an adapter; the layers that it is for have LoRA before."""
    if not getattr(self, "_lora_enabled_layers", None):
        # What `load_lora_weights` would do itself, before its variables are known to be read.
        import h5py

        with h5py.File(filepath, "r") as file:
            self.enable_lora(int(file["lora/vars/rank"][()]))
    with reading_parts(self):
        return original(self, filepath)


def patches_of(models) -> tuple[Patch, ...]:
    """What of `keras_hub.models` is wrapped."""
    return (
        Patch(models.Backbone, "save_lora_weights", ("self", "filepath"), _save_adapter),
        Patch(models.Backbone, "load_lora_weights", ("self", "filepath"), _load_adapter),
        Patch(models.Backbone, "save_to_preset", ("self", "preset_dir"), write_once),
        Patch(models.Task, "save_to_preset", ("self", "preset_dir"), write_once),
    )


def install_hub() -> None:
    """Wraps KerasHub's methods, where it is imported; a second call does nothing."""
    models = getattr(sys.modules.get("keras_hub"), "models", None)
    if models is not None:
        _install(models)


@functools.cache
def _install(models) -> None:
    apply_patches(patches_of(models))
