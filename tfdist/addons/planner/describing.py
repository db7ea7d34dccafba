"""The description of a built Keras model. No other part of the planner requires TensorFlow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfdist.addons.planner.models import Transformer
from tfdist.addons.planner.parts import Model, Part
from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Described:
    """A built model as a chain, which only the data and pipeline axes can split.

    Attributes:
        parts: One part for each segment of the chain.
        tokens: Tokens of a sample; 1 for a model without tokens.
        shared_parameters: Parameters that two segments share.
    """

    parts: tuple[Part, ...]
    tokens: int
    shared_parameters: float

    def divides(self, axis: str, ranks: int) -> str | None:
        """The reason why an axis of `ranks` ranks cannot split the model, or None; see `Model`."""
        if axis in ("tensor", "context", "expert") and ranks > 1:
            return f"a built model cannot be planned on the {axis} axis"
        if axis == "pipeline" and ranks > len(self.parts):
            return f"its chain has only {len(self.parts)} segments"
        return None


def describe(model: Any, *, length: int | None = None) -> Model:
    """Describe a built Keras model for the planner.

    A `tfdist.models.gpt` becomes a `Transformer`, which all axes can split. Any other model is split
    into the segments that `PipelineModel` uses: FLOPs are those of the products in the graph of each
    segment, and activations the tensors that its backward pass reads from its forward pass.

    Args:
        model: A Sequential or functional model with known shapes, except for the batch size.
        length: Tokens of a sample, for a `tfdist.models.gpt`; None for its maximum.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: The model is not a chain of layers, or a shape is unknown.
    """
    import keras

    checks.instance("model", model, keras.Model, "a keras.Model")
    checks.integer("length", length, minimum=1, optional=True)
    return _transformer(model, length) or _chain(model)


def _transformer(model: Any, length: int | None) -> Transformer | None:
    """The description of a `tfdist.models.gpt`, or None for another model."""
    import keras

    from tfdist import layers, models

    blocks = [each for each in model.layers if isinstance(each, models.TransformerDecoderBlock)]
    embeddings = [each for each in model.layers if isinstance(each, layers.VocabParallelEmbedding)]
    if not blocks or len(embeddings) != 1:
        return None
    config = [
        {key: value for key, value in each.get_config().items() if key != "name"} for each in blocks
    ]
    known = (
        models.TransformerDecoderBlock,
        layers.VocabParallelEmbedding,
        layers.VocabParallelHead,
        layers.PositionEmbedding,
        layers.LayerNormalization,
        layers.RMSNormalization,
        layers.Dropout,
        keras.layers.InputLayer,
    )
    # The chain is more accurate if blocks differ, or if there are other layers between them.
    if any(each != config[0] for each in config) or not all(
        isinstance(each, known) for each in model.layers
    ):
        return None
    positions = [each for each in model.layers if isinstance(each, layers.PositionEmbedding)]
    if length is None:
        length = positions[0].get_config()["max_length"] if positions else model.inputs[0].shape[1]
    if length is None:
        raise ValueError(
            "`length` must be given for a model with rotary position embeddings. Received: length=None."
        )
    first, table = config[0], embeddings[0].get_config()
    return Transformer(
        layers=len(blocks),
        width=table["output_dim"],
        heads=first["num_heads"],
        kv_heads=first["num_key_value_heads"],
        head_dim=first["head_dim"],
        hidden=first["hidden_dim"],
        vocabulary=table["input_dim"],
        length=length,
        gated=first["activation"] == "swiglu",
        experts=first["num_experts"],
        top_k=(first["experts"] or {}).get("top_k", 2),
        tied=not any(isinstance(each, layers.VocabParallelHead) for each in model.layers),
        learned_positions=bool(positions),
        use_bias=first["use_bias"],
        norm_bias=first["normalization"] == "layer",
        dropout=bool(first["dropout"]),
        blockwise=length >= 1024,
    )


def _inactive(model: Any) -> float:
    """The number of parameters of the experts that a token is not routed to."""
    from tfdist.backend.keras.private import all_layers
    from tfdist.experts import MixtureOfExperts

    mixtures = [each for each in all_layers(model) if isinstance(each, MixtureOfExperts)]
    counts = [each.num_parameters for each in mixtures]
    return float(sum(each["total"] - each["active"] for each in counts))


def _chain(model: Any) -> Described:
    from tfdist.pipeline.chain import Chain
    from tfdist.pipeline.costs import kept_bytes, training_graph

    chain = Chain(model)
    chain.check_known_shapes("the description of a model")
    specs, flops = chain.specs(1), chain.flops(1)
    parts = []
    for number, (segment, count) in enumerate(zip(chain.segments, flops, strict=True)):
        graph, _, forward = training_graph(segment, segment.arguments(specs))
        parts.append(
            Part(
                f"{number}: {segment.model.name}",
                whole_parameters=segment.parameters,
                inactive_parameters=_inactive(segment.model),
                flops=float(count),
                # In elements, because the graph is traced in float32.
                kept_whole=kept_bytes(graph, forward) / 4,
                output=sum(math.prod(specs[each].shape) for each in segment.makes),
            )
        )
    whole = sum(math.prod(each.shape) for each in model.trainable_variables)
    shape, dtype = model.inputs[0].shape, model.inputs[0].dtype
    is_text = len(shape) == 2 and "int" in dtype
    return Described(
        tuple(parts),
        int(shape[1]) if is_text else 1,
        float(sum(part.whole_parameters for part in parts) - whole),
    )
