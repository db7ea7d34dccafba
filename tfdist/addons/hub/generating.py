"""Generation by several ranks: they use the same prompts and draw the same tokens."""

from __future__ import annotations

import hashlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.kernels import enabling_kernels
from tfdist.collectives import Group, all_gather_object, broadcast
from tfdist.step.context import strategy_of


def generate_alike(self, inputs, *args, original, **kwargs):
    """Wraps `keras_hub.models.CausalLM.generate`.

    Ranks with parts of the same model compute each token together. A sampler without a seed starts
    from a different number in each process, so the ranks would continue from different tokens.
    """
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, inputs, *args, **kwargs)
    mesh = strategy.mesh
    axes = (*mesh.stage_axes, *mesh.weight_axes)
    if strategy.zero_stage == 3:
        axes = (*mesh.gradient_axes, *axes)
    group = strategy.group(*axes)
    if group.size > 1:
        _check_alike((inputs, args, kwargs), self, group)
        # A model that is not compiled has no sampler; `generate` itself raises the error.
        for variable in getattr(getattr(self, "sampler", None), "variables", ()):
            variable.assign(broadcast(variable.value, group, name="generate/seed"))
        with enabling_kernels():
            return original(self, inputs, *args, **kwargs)
    return original(self, inputs, *args, **kwargs)


def _check_alike(asked, model, group: Group) -> None:
    found = all_gather_object(_digest(asked), group, name="generate/inputs")
    if len(set(found)) > 1:
        raise ValueError(
            "Ranks with parts of the same model must generate from the same prompts. Received: "
            f"different arguments of `{model.name}.generate` on ranks {_others(found, group)} than on rank "
            f"{group.ranks[0]}. Pass the same to all of them, with prompts of all ranks in one batch."
        )


def _others(found: list[str], group: Group) -> list[int]:
    pairs = zip(group.ranks, found, strict=True)
    return [rank for rank, digest in pairs if digest != found[0]]


def _digest(asked) -> str:
    """A hash of strings, numbers and arrays; for a dataset, of its structure only."""
    total = hashlib.sha256()
    for leaf in keras.tree.flatten(asked):
        if isinstance(leaf, tf.data.Dataset):
            leaf = str(leaf.element_spec)
        array = np.asarray(leaf)
        total.update(f"{array.dtype.kind}{array.shape}".encode())
        # Strings in object arrays are hashed by value, because their bytes would be addresses.
        texts = array.dtype.kind in "OSU"
        total.update(repr(array.tolist()).encode() if texts else array.tobytes())
    return total.hexdigest()
