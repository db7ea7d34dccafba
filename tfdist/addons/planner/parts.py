"""What a model is to the planner: a chain of parts with their sizes and work for one sample."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from tfdist.utils import checks


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A layer, or a block of layers that is not cut, `count` times in a row.

    All sizes are of one of them and of one sample. What the tensor axis splits is "split", what each
    of its ranks has as a whole is "whole". FLOPs are those of matrix products, 2 for a
    multiplication and an addition; a backward pass takes twice those of the forward pass.

    Attributes:
        name: What it is.
        count: How many equal ones follow each other.
        whole_parameters: Parameters that each tensor rank has.
        float32_parameters: Of these, those that are float32 whatever the policy, as routers are.
        split_parameters: Parameters that tensor ranks split.
        expert_parameters: Those of all experts; split over expert and tensor axis.
        inactive_parameters: Of all these, those of experts that a token is not sent to.
        flops: FLOPs of a forward pass, split over the tensor axis, without the attention core.
        attention_flops: Those of the attention core, which selective recompute does again.
        kept_whole: Elements kept for the backward pass, not split.
        kept_gathered: Of these, inputs of products that sequence parallelism gathers.
        kept_split: Elements kept that tensor ranks split.
        kept_attention: Elements of the attention core that are kept, split.
        kept_ring: Those on a context axis, where attention goes by blocks.
        mask_whole: Bytes of dropout masks, not split.
        mask_attention: Bytes of those of the attention core, split.
        float32_split: Elements kept in float32 whatever the dtype, as logits; split.
        output: Elements of the tensor that leads to the next part.
        tensor_sums: All-reduces of `output` over the tensor axis, in each direction.
        exchanged: Elements sent to experts, and as many back.
        keys_values: Elements of keys and values, which travel on a context axis.
        last_flops: FLOPs of the product at its end, whose result no gradient needs; split.
        splits_tokens: Whether a context axis divides its work and activations.
        attention_backward: FLOPs of the core's backward pass over those of its forward pass.
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
        """Parameters of one of them."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters


class Model(Protocol):
    """A model as the planner takes it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chain, first to last."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of a sample; 1 where a sample has none."""
        ...

    @property
    def shared_parameters(self) -> float:
        """Parameters that the last part shares with the first, as a tied head does."""
        ...

    def divides(self, axis: str, ranks: int) -> str | None:
        """None if ranks of an axis can divide the model, else why not, in words."""
        ...


def check_model(model: Any) -> None:
    """Raises a TypeError unless a value describes a model."""
    if not all(hasattr(model, name) for name in ("parts", "tokens", "divides")):
        raise checks.refuse(
            "model",
            model,
            "a description of a model, as tfdist.addons.planner.Transformer",
            TypeError,
        )


def count_parameters(model: Model) -> float:
    """All parameters, those that two parts share counted once."""
    return sum(part.count * part.parameters for part in model.parts) - model.shared_parameters


def count_active_parameters(model: Model) -> float:
    """The parameters that a token uses: of a mixture those of `top_k` experts, not of all."""
    return count_parameters(model) - sum(
        part.count * part.inactive_parameters for part in model.parts
    )


def forward_flops(model: Model) -> float:
    """FLOPs of a forward pass over a sample."""
    return sum(part.count * (part.flops + part.attention_flops) for part in model.parts)


def training_flops(model: Model) -> float:
    """FLOPs of a training step over a sample: forward once, and twice as much backward.

    What recompute or blockwise attention does again is not counted: these are "model FLOPs"
    (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    return 3.0 * forward_flops(model)
