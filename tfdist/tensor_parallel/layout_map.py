"""Plans from `keras.distribution.LayoutMap`, as KerasHub's `get_layout_map` returns them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import keras

from tfdist.backend.keras.private import all_layers
from tfdist.step.context import current_strategy
from tfdist.tensor_parallel.attributes import variables_of_layer
from tfdist.tensor_parallel.blocks import projections
from tfdist.tensor_parallel.equations import terms
from tfdist.tensor_parallel.finding import attention_kinds, check_large
from tfdist.tensor_parallel.plan import paths_matched

#: The axes of Keras' meshes over which weights are split, and those over which rows are.
_KERAS_AXES = {"model": "weights", "tensor": "weights", "batch": "rows", "data": "rows"}


def is_layout_map(plan) -> bool:
    """Whether a plan is a `LayoutMap` of Keras."""
    return isinstance(plan, keras.distribution.LayoutMap)


def plan_of_layout_map(model: keras.Model, layout_map) -> dict[str, str]:
    """Converts a `LayoutMap` for a model's variables to a plan.

    A dim on the axis "model" is split over the tensor axis. A dim on the axis "batch" or "data" means
    that the variable is split over the data ranks too, which is ZeRO stage 3. The sizes of the map's
    device mesh are ignored; those of the strategy's mesh are used.

    In Keras a layout only determines where values are stored, and does not change the results. Here
    queries, keys and values are split by heads along any dim that the map has on the model axis:
    KerasHub's maps of Llama and Qwen use the dim of the inputs.

    Args:
        model: The model.
        layout_map: The map; its patterns match whole paths, as since Keras 3.14.

    Returns:
        The plan.

    Raises:
        ValueError: The map has an unknown axis or a dim that cannot be split, or the data axis while the
            strategy's `zero_stage` is not 3; a rule matches nothing, or a large variable has none.
    """
    paths = [weight.path for weight in model.weights]
    for pattern in layout_map:
        paths_matched(pattern, paths)
    layers = all_layers(model)
    heads = {
        id(part): kind
        for layer in layers
        for part, kind in attention_kinds(layer, projections(layer))
        if kind != "row"
    }
    plan: dict[str, str] = {}
    met = set()
    for layer in layers:
        for variable in variables_of_layer(layer):
            layout = layout_map[variable.path]
            if layout is None:
                continue
            met.add(id(layer))
            dims = {}
            for dim, axis in enumerate(layout.axes):
                if axis is not None:
                    dims[_meaning(axis, variable.path)] = dim
            if "rows" in dims:
                _check_zero(variable.path)
            if "weights" in dims:
                kind = _kind(layer, variable, dims["weights"], heads)
                if kind is not None:
                    plan[re.escape(variable.path)] = kind
    check_large(model, met, "Add a rule for it to the map, if only with None for each dim.")
    return plan


def _meaning(axis: str, path: str) -> str:
    if axis in _KERAS_AXES:
        return _KERAS_AXES[axis]
    raise ValueError(
        f"The axes of a LayoutMap must be {_called('weights')}, over which weights are split, or "
        f"{_called('rows')}. Received: {axis!r} for `{path}`."
    )


def _called(meaning: str) -> str:
    return " or ".join(name for name, means in _KERAS_AXES.items() if means == meaning)


def _check_zero(path: str) -> None:
    strategy = current_strategy()
    # A strategy with one data rank has no ZeRO stage.
    if strategy is None or strategy.gradient_group.size == 1:
        return
    if strategy.zero_stage != 3:
        raise ValueError(
            f"A LayoutMap that splits `{path}` over the data axis requires zero_stage=3. "
            f"Received: a strategy with zero_stage={strategy.zero_stage}. Create it with zero_stage=3, "
            "or remove the axis from the map."
        )


def _kind(layer, variable, dim: int, heads: Mapping[int, str]) -> str | None:
    """The word for a variable whose dim is on the model axis; None for one that follows a kernel."""
    is_product = isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))
    if is_product and variable.name != "kernel":
        return None
    if id(layer) in heads:
        return heads[id(layer)]
    if isinstance(layer, keras.layers.Embedding):
        rows = 1 if variable.name == "reverse_embeddings" else 0
        if dim == rows:
            return "vocabulary"
    elif isinstance(layer, keras.layers.Dense):
        return "row" if dim == 0 else "column"
    elif isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = terms(layer.equation)
        if kernel[dim] in outputs and kernel[dim] not in inputs:
            return "column"
        if kernel[dim] in inputs and kernel[dim] not in outputs:
            return "row"
    raise ValueError(
        f"A LayoutMap can only split heads, units and vocabularies over the model axis. Received: dim {dim} "
        f"of `{variable.path}`, of shape {tuple(variable.shape)}, in a {type(layer).__name__}."
    )
