"""The planner's description of a model: a chain of parts with sizes and FLOPs per sample."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from tfdist.utils import checks


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A layer, or an indivisible block of layers, repeated `count` times.

    All sizes are for one repetition and one sample. "split" means sharded over the tensor axis,
    "whole" replicated on it. FLOPs are those of matrix products, 2 for a multiplication and an
    addition; a backward pass requires twice those of the forward pass.

    Attributes:
        name: Name of the part.
        count: Number of consecutive repetitions.
        whole_parameters: Replicated parameters.
        float32_parameters: Of these, parameters that are float32 under any policy, such as routers.
        split_parameters: Parameters sharded over the tensor axis.
        expert_parameters: Parameters of all experts, sharded over the expert and tensor axes.
        inactive_parameters: Of `expert_parameters`, those of experts that a token is not routed to.
        flops: FLOPs of a forward pass without the attention core; split.
        attention_flops: FLOPs of the attention core, which selective recompute repeats.
        kept_whole: Elements stored for the backward pass, not split.
        kept_gathered: Of these, inputs of products that sequence parallelism gathers.
        kept_split: Elements stored for the backward pass, split.
        kept_attention: Elements of the attention core that are stored, split.
        kept_ring: The same on a context axis, where attention is blockwise.
        mask_whole: Bytes of dropout masks, not split.
        mask_attention: Bytes of dropout masks of the attention core, split.
        float32_split: Elements stored in float32 under any policy, such as logits; split.
        output: Elements of the input of the next part.
        tensor_sums: All-reduces of `output` over the tensor axis, in each direction.
        exchanged: Elements sent to experts; the same number is returned.
        keys_values: Elements of keys and values, which the context axis exchanges.
        last_flops: FLOPs of the last product, whose result no gradient requires; split.
        splits_tokens: Whether a context axis splits the FLOPs and activations.
        attention_backward: FLOPs of the core's backward pass relative to its forward pass.
    """

    name: str
    count: int = 1
    whole_parameters: float = 0
    float32_parameters: float = 0
    split_parameters: float = 0
    expert_parameters: float = 0
    inactive_parameters: float = 0
    flops: float = 0.0
    attention_flops: float = 0.0
    kept_whole: float = 0.0
    kept_gathered: float = 0.0
    kept_split: float = 0.0
    kept_attention: float = 0.0
    kept_ring: float = 0.0
    mask_whole: float = 0.0
    mask_attention: float = 0.0
    float32_split: float = 0.0
    output: float = 0.0
    tensor_sums: int = 0
    exchanged: float = 0.0
    keys_values: float = 0.0
    last_flops: float = 0.0
    splits_tokens: bool = False
    attention_backward: float = 2.0

    @property
    def parameters(self) -> float:
        """Parameters of one repetition."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters


class Model(Protocol):
    """The interface of a model's description."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the chain, in order."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of a sample; 1 for models without tokens."""
        ...

    @property
    def shared_parameters(self) -> float:
        """Parameters that the first and last part share, such as those of a tied head."""
        ...

    def divides(self, axis: str, ranks: int) -> str | None:
        """The reason why an axis of `ranks` ranks cannot split the model, as text, or None."""
        ...


def check_model(model: Any) -> None:
    """Raise a TypeError unless a value describes a model."""
    if not all(hasattr(model, name) for name in ("parts", "tokens", "divides")):
        raise checks.refuse(
            "model",
            model,
            "a description of a model, such as a tfdist.addons.planner.Transformer",
            TypeError,
        )


def count_parameters(model: Model) -> float:
    """Number of parameters; shared ones count once."""
    return sum(part.count * part.parameters for part in model.parts) - model.shared_parameters


def count_active_parameters(model: Model) -> float:
    """Number of parameters that a token uses; of a mixture of experts those of `top_k`."""
    return count_parameters(model) - sum(
        part.count * part.inactive_parameters for part in model.parts
    )


def forward_flops(model: Model) -> float:
    """FLOPs of a forward pass over a sample."""
    return sum(part.count * (part.flops + part.attention_flops) for part in model.parts)


def training_flops(model: Model) -> float:
    """Model FLOPs of a training step over a sample: three times those of the forward pass.

    Repeated work of recompute or blockwise attention is not counted (Chowdhery et al. 2022, "PaLM",
    appendix B).
    """
    return 3.0 * forward_flops(model)
