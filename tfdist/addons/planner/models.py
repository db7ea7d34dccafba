"""Descriptions of models by their sizes: a transformer, a ConvNet, a multi-layer perceptron."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfdist.addons.planner.parts import Part
from tfdist.utils import checks

#: Above the sizes of any model, and small enough for their product to be a finite float.
_MOST = 10**9


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer.

    Parameters, FLOPs and activations are those of the formulas of Narayanan et al. 2021
    (arXiv:2104.04473, section 5.1 and appendix) and of Korthikanti et al. 2022 (arXiv:2205.05198,
    section 4), with the terms that they leave out: grouped key/value heads, gated feed-forward
    networks, experts, untied heads, no dropout.

    Attributes:
        layers: Number of blocks.
        width: Size of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads; None for the number of query heads.
        head_dim: Size of a head; None for width / heads.
        hidden: Hidden units of the feed-forward network; None for 4 x width.
        vocabulary: Size of the vocabulary.
        length: Tokens of a sample.
        gated: Whether the feed-forward network is gated (SwiGLU), with three matrices instead of
            two.
        experts: Experts of each block; None for one dense feed-forward network.
        top_k: Experts that a token is routed to.
        tied: Whether the head shares the weights of the embedding.
        learned_positions: Whether position embeddings are learned.
        use_bias: Whether dense layers have a bias.
        norm_bias: Whether normalization layers have a bias; False for RMS normalization.
        dropout: Whether dropout masks are stored.
        blockwise: Whether attention is computed in blocks (Dao et al. 2022), so that the matrix of
            length x length is not stored.
        causal_flops: Whether the masked half of the attention is skipped. The formulas of both
            papers count it.

    Raises:
        ValueError: A size is not a positive integer, or is not divisible as required.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    gated: bool = False
    experts: int | None = None
    top_k: int = 2
    tied: bool = True
    learned_positions: bool = True
    use_bias: bool = True
    norm_bias: bool = True
    dropout: bool = False
    blockwise: bool = False
    causal_flops: bool = False

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocabulary", "length", "top_k"):
            checks.integer(name, getattr(self, name), minimum=1, maximum=_MOST)
        for name in ("kv_heads", "head_dim", "hidden", "experts"):
            checks.integer(name, getattr(self, name), minimum=1, maximum=_MOST, optional=True)
        for field in dataclasses.fields(self):
            if field.type == "bool":
                checks.boolean(field.name, getattr(self, field.name))
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                "`width` must be divisible by `heads`, unless `head_dim` is given. Received: "
                f"width={self.width}, heads={self.heads}."
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                "`heads` must be a multiple of `kv_heads`. Received: "
                f"kv_heads={self.kv_heads}, heads={self.heads}."
            )
        if self.top_k > (self.experts or self.top_k):
            raise ValueError(
                "`top_k` must be at most `experts`. Received: "
                f"top_k={self.top_k}, experts={self.experts}."
            )

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Size of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def hidden_units(self) -> int:
        """Hidden units of a feed-forward network."""
        return self.hidden or 4 * self.width

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.length

    @property
    def shared_parameters(self) -> float:
        """Parameters of the embedding if the head is tied to it, else 0."""
        return float(self.vocabulary * self.width) if self.tied else 0.0

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The embedding, the blocks, and the head with its normalization and loss."""
        return (self._embedding(), self._block(), self._head())

    def divides(self, axis: str, ranks: int) -> str | None:
        """The reason why an axis of `ranks` ranks cannot split the model, or None; see `Model`."""
        if axis == "tensor" and self.heads % ranks:
            return f"{self.heads} heads are not divisible by {ranks}"
        if axis == "tensor" and self.key_value_heads % ranks:
            return f"{self.key_value_heads} key/value heads are not divisible by {ranks}"
        if axis == "tensor" and self.hidden_units % ranks:
            return f"{self.hidden_units} hidden units are not divisible by {ranks}"
        if axis == "pipeline" and ranks > self.layers:
            return f"there are only {self.layers} blocks"
        if axis == "expert" and ranks > 1 and (self.experts is None or self.experts % ranks):
            if self.experts is None:
                return "the model has no experts"
            return f"{self.experts} experts are not divisible by {ranks}"
        if axis == "context" and ranks > 1 and self.length % (2 * ranks):
            return f"{self.length} tokens are not divisible into {2 * ranks} chunks"
        return None

    def _norm_parameters(self) -> int:
        return self.width * (2 if self.norm_bias else 1)

    def _embedding(self) -> Part:
        positions = self.length * self.width if self.learned_positions else 0
        size = self.length * self.width
        return Part(
            "embedding",
            split_parameters=self.vocabulary * self.width,
            whole_parameters=positions,
            mask_whole=size if self.dropout else 0,
            output=size,
            tensor_sums=1,
            splits_tokens=True,
        )

    def _block(self) -> Part:
        s, h, d = self.length, self.width, self.size_of_head
        queries, keys = self.heads * d, self.key_value_heads * d
        f, matrices = self.hidden_units, 3 if self.gated else 2
        attention = h * (queries + 2 * keys) + queries * h
        network = matrices * h * f
        biases = (queries + 2 * keys) if self.use_bias else 0
        hidden_biases = (matrices - 1) * f if self.use_bias else 0
        output_biases = h if self.use_bias else 0
        used = self.top_k if self.experts else 1
        # The inputs of two norms and of two products are not split; with masks they are the 10 s b h
        # of Korthikanti et al.
        whole = 4 * s * h
        # Stored: query, key, value and the input of the projection, see `kept_split` below.
        # The hidden units before and after the activation; with a gate both products, the activated
        # gate, and the product of the gate and the other.
        network_kept = s * f * (4 if self.gated else 2)
        # The inputs and outputs of each of a token's experts are stored.
        extra = s * h * used * 2 if self.experts else 0
        scores = self.heads * s * s
        core = 4.0 * self.heads * d * s * s * (0.5 if self.causal_flops else 1.0)
        router = h * self.experts if self.experts else 0
        # Blockwise attention stores the log-sum-exp of each row of scores. Otherwise the softmax is
        # stored, with dropout also its dropped copy, and a key and a value for each query head.
        by_blocks = 2 * self.heads * s
        matrix = scores * (2 if self.dropout else 1) + 2 * s * (queries - keys)
        common = self._norm_parameters() * 2 + output_biases
        expert = network + hidden_biases + output_biases
        return Part(
            "block",
            count=self.layers,
            whole_parameters=common + router + (0 if self.experts else output_biases),
            float32_parameters=router,
            split_parameters=attention + biases + (0 if self.experts else network + hidden_biases),
            expert_parameters=expert * (self.experts or 0),
            inactive_parameters=expert * (self.experts - used) if self.experts else 0,
            flops=2.0 * s * (attention + used * network + router),
            attention_flops=core,
            kept_whole=whole + extra,
            kept_gathered=2 * s * h,
            kept_split=s * (2 * queries + 2 * keys) + used * network_kept,
            kept_attention=by_blocks if self.blockwise else matrix,
            # Ring attention stores its output by heads in addition to the input of the projection.
            kept_ring=by_blocks + s * queries,
            mask_whole=2 * s * h if self.dropout else 0,
            mask_attention=scores if self.dropout and not self.blockwise else 0,
            output=s * h,
            tensor_sums=2,
            exchanged=s * used * h if self.experts else 0,
            keys_values=2 * s * keys,
            last_flops=2.0 * s * used * h * f,
            splits_tokens=True,
            attention_backward=2.5 if self.blockwise else 2.0,
        )

    def _head(self) -> Part:
        s, h = self.length, self.width
        return Part(
            "head",
            whole_parameters=self._norm_parameters(),
            split_parameters=self.vocabulary * h,
            flops=2.0 * s * h * self.vocabulary,
            # The inputs of the last norm and of the product: Korthikanti et al., section 4.3.
            kept_whole=2 * s * h,
            kept_gathered=s * h,
            float32_split=s * self.vocabulary,
            output=0,
            tensor_sums=0,
            splits_tokens=True,
        )


@dataclasses.dataclass(frozen=True)
class MLP:
    """A stack of dense layers, each with a bias and an activation.

    A layer of `in` and `out` units costs 2 in out FLOPs forward for a sample, and 6 in a step.

    Attributes:
        widths: Units of the input, of each hidden layer, and of the output.

    Raises:
        ValueError: There are fewer than two widths, or one is not a positive integer.
    """

    widths: Sequence[int]
    tokens: int = dataclasses.field(default=1, init=False)
    shared_parameters: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self):
        widths = checks.integers("widths", self.widths, minimum=1)
        if len(widths) < 2:
            raise checks.refuse("widths", self.widths, "at least two integers: input and output")
        object.__setattr__(self, "widths", widths)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """One part for each layer."""
        return tuple(
            Part(
                f"dense_{number}",
                whole_parameters=(one + 1) * other,
                flops=2.0 * one * other,
                kept_whole=one + other,
                output=other,
            )
            for number, (one, other) in enumerate(zip(self.widths, self.widths[1:], strict=False))
        )

    def divides(self, axis: str, ranks: int) -> str | None:
        """The reason why an axis of `ranks` ranks cannot split the model, or None; see `Model`."""
        return _plain_divides(self.parts, axis, ranks)


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """A stack of square convolutions, global average pooling and a dense head.

    A convolution with a kernel of k x k costs 2 k^2 in out FLOPs for each output pixel.

    Attributes:
        size: Height and width of the input.
        channels: Channels of the input.
        filters: Filters of each convolution.
        strides: Stride of each convolution; None for 1.
        kernel: Height and width of the kernels.
        classes: Units of the head.

    Raises:
        ValueError: A size is not a positive integer, or the number of strides differs from that of
            filters.
    """

    size: int
    channels: int
    filters: Sequence[int]
    classes: int
    strides: Sequence[int] | None = None
    kernel: int = 3
    tokens: int = dataclasses.field(default=1, init=False)
    shared_parameters: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self):
        for name in ("size", "channels", "classes", "kernel"):
            checks.integer(name, getattr(self, name), minimum=1, maximum=_MOST)
        filters = checks.integers("filters", self.filters, minimum=1)
        strides = checks.integers("strides", self.strides, minimum=1, optional=True)
        strides = strides or (1,) * len(filters)
        if len(strides) != len(filters):
            raise ValueError(
                "`strides` must have one entry for each of the `filters`. Received: "
                f"filters={filters}, strides={strides}."
            )
        object.__setattr__(self, "filters", filters)
        object.__setattr__(self, "strides", strides)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """One part for each convolution with its normalization and activation, and the head."""
        found, size, channels = [], self.size, self.channels
        for number, (filters, stride) in enumerate(
            zip(self.filters, self.strides or (), strict=True)
        ):
            inputs = size * size * channels
            size = -(-size // stride)
            outputs = size * size * filters
            found.append(
                Part(
                    f"convolution_{number}",
                    whole_parameters=self.kernel**2 * channels * filters + 2 * filters,
                    flops=2.0 * self.kernel**2 * channels * outputs,
                    # The inputs of the convolution, of the normalization and of the activation.
                    kept_whole=inputs + 2 * outputs,
                    output=outputs,
                )
            )
            channels = filters
        head = Part(
            "head",
            whole_parameters=(channels + 1) * self.classes,
            flops=2.0 * channels * self.classes,
            kept_whole=channels + self.classes,
        )
        return (*found, head)

    def divides(self, axis: str, ranks: int) -> str | None:
        """The reason why an axis of `ranks` ranks cannot split the model, or None; see `Model`."""
        return _plain_divides(self.parts, axis, ranks)


def _plain_divides(parts: Sequence[Part], axis: str, ranks: int) -> str | None:
    """`Model.divides` of models that only the data and pipeline axes can split."""
    if axis in ("tensor", "context", "expert") and ranks > 1:
        return f"its layers are not split over the {axis} axis"
    layers = sum(part.count for part in parts)
    return f"there are only {layers} layers" if axis == "pipeline" and ranks > layers else None
