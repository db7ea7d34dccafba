"""Plans out of `keras.distribution.LayoutMap`, as KerasHub's `get_layout_map` returns them."""

from __future__ import annotations

import re

import keras

from tfdist.context import current_strategy
from tfdist.keras_internals.attributes import variables_of_layer
from tfdist.keras_internals.private import all_layers
from tfdist.tensor_parallel.equations import terms

__all__ = ["is_layout_map", "plan_of_layout_map"]

#: What meshes of Keras call the axis that weights are split over, and the one that rows are.
_KERAS_AXES = {"model": "weights", "tensor": "weights", "batch": "rows", "data": "rows"}


def is_layout_map(plan) -> bool:
    """Whether a plan is one of Keras'."""
    return isinstance(plan, keras.distribution.LayoutMap)


def plan_of_layout_map(model: keras.Model, layout_map) -> dict[str, str]:
    """What a `LayoutMap` says of a model's variables, in the words of a plan.

    A dim on the axis "model" is split over the tensor axis. A dim on the axis "batch" or "data" says
    that the variable is split over the data ranks too, which is ZeRO stage 3.

    Args:
        model: The model.
        layout_map: The map; its patterns match whole paths, as since Keras 3.14.

    Raises:
        ValueError: It names another axis or a dim that cannot be split, or the data axis where the
            strategy's `zero_stage` is not 3.
    """
    plan: dict[str, str] = {}
    for layer in all_layers(model):
        for variable in variables_of_layer(layer):
            layout = layout_map[variable.path]
            if layout is None:
                continue
            dims = {}
            for dim, axis in enumerate(layout.axes):
                if axis is not None:
                    dims[_meaning(axis, variable.path)] = dim
            if "rows" in dims:
                _check_zero(variable.path)
            if "weights" in dims:
                kind = _kind(layer, variable, dims["weights"])
                if kind is not None:
                    plan[re.escape(variable.path)] = kind
    return plan


def _meaning(axis: str, path: str) -> str:
    if axis in _KERAS_AXES:
        return _KERAS_AXES[axis]
    raise ValueError(
        f"A LayoutMap's axes are one of model, tensor, over which weights are split, and one of "
        f"batch, data. Received: {axis!r} for `{path}`."
    )


def _check_zero(path: str) -> None:
    strategy = current_strategy()
    if strategy is not None and strategy.zero_stage != 3:
        raise ValueError(
            f"The LayoutMap splits `{path}` over the data axis as well, which is ZeRO stage 3. "
            f"Received: a strategy with zero_stage={strategy.zero_stage}. Make it with zero_stage=3, "
            "or leave the axis out of the map."
        )


def _kind(layer, variable, dim: int) -> str | None:
    """The word for a variable whose dim is on the model axis; None for a bias, which follows."""
    if isinstance(layer, keras.layers.Embedding):
        rows = 1 if variable.name == "reverse_embeddings" else 0
        if dim == rows:
            return "vocabulary"
    elif isinstance(layer, keras.layers.Dense):
        if len(variable.shape) == 1:
            return None
        return "row" if dim == 0 else "column"
    elif isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = terms(layer.equation)
        if len(variable.shape) < len(kernel):
            return None
        if kernel[dim] in outputs and kernel[dim] not in inputs:
            return "column"
        if kernel[dim] in inputs and kernel[dim] not in outputs:
            return "row"
    raise ValueError(
        f"A LayoutMap splits heads, units and vocabularies over the model axis. Received: dim {dim} "
        f"of `{variable.path}`, of shape {tuple(variable.shape)}, in a {type(layer).__name__}."
    )
