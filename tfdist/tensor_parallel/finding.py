"""Finds a plan by a model's structure: attention, feed-forward blocks, embeddings.

The search uses structures that all transformers have: a layer with projections of query, key,
value and output; layers inside one block of which some widen and one narrows again; a table of
tokens. A plan that is found is compared with the whole model like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator

import keras

from tfdist.backend.keras.attributes import history, kernel_of, sublayers, table_of
from tfdist.backend.keras.private import all_layers
from tfdist.sharding.split import split_of
from tfdist.tensor_parallel.adapters import computes_as
from tfdist.tensor_parallel.adapters_dense import DenseAdapter, EinsumDenseAdapter
from tfdist.tensor_parallel.attributes import int4_inputs, int4_outputs, variables_of_layer
from tfdist.tensor_parallel.blocks import projections
from tfdist.tensor_parallel.choosing import adapter_class
from tfdist.tensor_parallel.equations import terms
from tfdist.tensor_parallel.registered import only_kind, parts_of_registered
from tfdist.utils import checks

#: A variable without a rule is an error if it is at least this fraction of the model.
_LARGE = 0.1
#: Layers that stay whole: convolutions, as of patches, tables of positions, and banks of experts.
_WHOLE = re.compile(r".*(Conv|Position|Expert|Moe|MoE).*")


def find_plan(model: keras.Model) -> dict[str, str]:
    """Finds a plan for a model's transformer blocks, embeddings and head.

    Layers with a registered split are split too, if it has a single kind, whose output is not split.

    Args:
        model: A built model.

    Returns:
        A dict from patterns of paths to words, for `parallelize`.

    Raises:
        ValueError: Nothing can be split, or there is no rule for a large variable.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    if not model.built:
        raise ValueError(f"A plan requires a built model. Received: `{model.name}`, not built.")
    kinds: dict[int, tuple[keras.layers.Layer, str]] = {}
    layers = all_layers(model)
    inside = parts_of_registered(layers)
    for layer in layers:
        if id(layer) in inside:
            continue
        roles = projections(layer)
        if split_of(layer) is not None:
            kind = only_kind(layer)
            if kind is not None:
                kinds.update((id(part), (layer, kind)) for part in all_layers(layer))
        elif roles:
            for part, kind in attention_kinds(layer, roles):
                kinds.setdefault(id(part), (part, kind))
        elif not isinstance(layer, keras.Model):
            for part, kind in _feed_forward(layer):
                kinds.setdefault(id(part), (part, kind))
    for layer in _tables(model):
        if id(layer) not in inside and split_of(layer) is None:
            kinds.setdefault(id(layer), (layer, "vocabulary"))
    if not any(kind != "replicate" for _, kind in kinds.values()):
        raise ValueError(
            f"An attention layer, feed-forward block or table of tokens was not found in `{model.name}`. "
            "Pass a plan: parallelize(model, {'.*/kernel': 'column', ...})."
        )
    check_large(model, kinds, "Pass a plan that includes it, if only as 'replicate'.")
    return {
        re.escape(variable.path): kind
        for layer, kind in kinds.values()
        if kind != "replicate"
        for variable in _main(layer)
    }


def _main(layer) -> list:
    adapter = adapter_class(layer)
    return [] if adapter is None else adapter.main(layer)


def attention_kinds(layer, roles) -> Iterator[tuple]:
    """The projections of an attention layer, each with the word by which its heads are split.

    Args:
        layer: The attention layer.
        roles: Its `projections`.
    """
    key_heads = [
        value
        for name, value in vars(layer).items()
        if name.lstrip("_") == "num_key_value_heads" and isinstance(value, int)
    ]
    for role, part in roles.items():
        if role == "output":
            yield part, "row"
        elif role in ("key", "value") and key_heads == [1]:
            yield part, "replicate"  # All queries share one head: each rank has it.
        else:
            yield part, "column"


def _feed_forward(layer) -> Iterator[tuple]:
    """Products directly inside a layer: those that widen, by columns, and one that narrows, by rows."""
    parts = [x for x in sublayers(layer) if _is_product(x)]
    sizes = [_sizes(part) for part in parts]
    for place, (inputs, outputs) in enumerate(sizes):
        ups = [
            x for x, size in zip(parts[:place], sizes, strict=False) if size == (outputs, inputs)
        ]
        if ups and (inputs, outputs) not in sizes[place + 1 :]:
            if inputs != outputs and sizes.count((inputs, outputs)) > 1:
                continue  # It is ambiguous which of them narrows the widened units.
            yield parts[place], "row"
            for up in ups:
                yield up, "column"


def _is_product(layer) -> bool:
    adapter = adapter_class(layer)
    if adapter not in (DenseAdapter, EinsumDenseAdapter):
        return False
    # Keras before 3.14 packs int4 by inputs, which cannot be split.
    if layer.quantization_mode == "int4" and not int4_outputs.is_known:
        return False
    return layer.built and computes_as(layer, adapter.stock)


def _sizes(layer) -> tuple[int, int]:
    """The numbers of inputs and outputs of a product."""
    if isinstance(layer, keras.layers.Dense):
        if layer.quantization_mode == "int4":
            return int4_inputs(layer), int4_outputs(layer)
        return tuple(kernel_of(layer).shape)
    _, labels, outputs = terms(layer.equation)
    shape = kernel_of(layer).shape
    if layer.quantization_mode == "int4":
        shape = layer.original_kernel_shape
    sizes = dict(zip(labels, shape, strict=True))
    into = math.prod(size for label, size in sizes.items() if label in outputs)
    return math.prod(shape) // into, into


def _tables(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Tables of tokens, and a last layer whose logits have the size of a vocabulary."""
    vocabularies = set()
    least = _LARGE * _size_of(model)
    for layer in all_layers(model):
        if not layer.built or not isinstance(layer, keras.layers.Embedding):
            continue
        is_large = math.prod(table_of(layer).shape) >= least
        if isinstance(layer, keras.layers.ReversibleEmbedding) or is_large:
            vocabularies.add(layer.input_dim)
            yield layer
    for tensor in getattr(model, "outputs", None) or []:
        last = history(tensor).operation
        if isinstance(last, keras.layers.Dense) and last.units in vocabularies:
            yield last


def _size_of(model) -> int:
    return sum(math.prod(variable.shape) for variable in model.weights) or 1


def check_large(model: keras.Model, met: Container[int], advice: str) -> None:
    """Checks that every large variable has a rule.

    Args:
        model: The model.
        met: The ids of layers that have a rule.
        advice: The remedy for such a variable, as a sentence.

    Raises:
        ValueError: One has none.
    """
    whole = _size_of(model)
    for layer in all_layers(model):
        if id(layer) in met or _WHOLE.fullmatch(type(layer).__name__):
            continue
        for variable in variables_of_layer(layer):
            if math.prod(variable.shape) > _LARGE * whole and len(variable.shape) > 1:
                raise ValueError(
                    "A rule for the split of a large variable is missing. Received: "
                    f"`{variable.path}` of shape {tuple(variable.shape)} in a "
                    f"{type(layer).__name__}, {math.prod(variable.shape) / whole:.0%} of "
                    f"`{model.name}`. {advice}"
                )
