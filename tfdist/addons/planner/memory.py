"""Memory of a rank, by kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import Machine
from tfdist.addons.planner.parts import Part
from tfdist.addons.planner.stages import Stage


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the peak of a step.

    Attributes:
        parameters: Stored parameters.
        copies: Their 16-bit copies for products.
        gradients: Gradients of parameters.
        optimizer: Optimizer state, including the master copy of parameters.
        activations: Activations stored for the backward pass.
        working: Temporary tensors: gradients of activations, and recomputed activations.
        buffers: Communication buffers of gradients, and parameters gathered for a layer.
        allocator: Bytes that the allocator reserves beyond those requested.
        process: Bytes of the process before a model is built, and of its groups of ranks.
        gradients_follow: Whether gradients replace activations, so that only the larger of the two
            counts: with one forward and one backward pass per step.
    """

    parameters: float
    copies: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    allocator: float
    process: float
    gradients_follow: bool

    @property
    def step(self) -> float:
        """Bytes allocated and released within a step."""
        passing = self.activations + self.working
        if self.gradients_follow:
            return max(passing, self.gradients) + self.buffers
        return passing + self.gradients + self.buffers

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        stored = self.parameters + self.copies + self.optimizer
        return stored + self.step + self.allocator + self.process

    @property
    def largest(self) -> str:
        """The largest kind, other than allocator and process."""
        kinds = (
            "parameters", "copies", "gradients", "optimizer", "activations", "working", "buffers",
        )  # fmt: skip
        return max(kinds, key=lambda kind: getattr(self, kind))


def rank_parameters(part: Part, layout: Layout) -> tuple[float, float]:
    """Parameters of dense layers and of experts on a rank, in parameters of the policy's dtype."""
    t, size = layout.tensor, layout.precision.parameter
    wider = 0.0 if layout.precision.master else part.float32_parameters * (4 / size - 1)
    dense = part.whole_parameters + wider + part.split_parameters / t
    return dense, part.expert_parameters / (layout.expert * t)


def kept_bytes(part: Part, layout: Layout, rows: float, recompute: str = "none") -> float:
    """Bytes of activations of a part that are stored for the backward pass, for `rows` rows.

    Korthikanti et al. 2022, equations 1 to 6, for any dtype: for a block without recompute
    s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism s b h / t (34 + 5 a s / h); without
    the term in a if the attention core is recomputed, and 2 s b h if the block is recomputed. With
    sequence parallelism they repeat the all-gather of the inputs of products in the backward pass;
    tfdist stores them, s b h (4 + 30 / t + ...), which saves a collective.
    """
    width, t = layout.precision.activation, layout.tensor
    whole = t if layout.sequence_parallel else 1
    scale = rows / (layout.context if part.splits_tokens else 1)
    if recompute == "every_layer":
        return scale * width * part.output / whole
    gathered = part.kept_gathered if whole > 1 and not layout.gathers_again else 0.0
    found = (width * (part.kept_whole - gathered) + part.mask_whole) / whole + width * gathered
    found += (width * part.kept_split + 4 * part.float32_split) / t
    if recompute != "selective":
        core = part.kept_ring if layout.context > 1 else part.kept_attention
        found += (width * core + part.mask_attention) / t
    return scale * found


@dataclasses.dataclass(frozen=True, slots=True)
class PartBytes:
    """Parameters and activations of a part on a rank, for a micro-batch.

    Attributes:
        dense: Parameters of dense layers.
        experts: Parameters of experts.
        kept: Bytes of activations stored with the layout's recompute.
        full: Bytes of activations stored without recompute.
        boundary: Bytes stored if the whole part is recomputed.
        gradient: Bytes of the gradient at the start of the backward pass.
    """

    dense: float
    experts: float
    kept: float
    full: float
    boundary: float
    gradient: float


def part_bytes(part: Part, layout: Layout, rows: float) -> PartBytes:
    """Parameters and activations of a part; recompute excludes the embedding and the head."""
    dense, experts = rank_parameters(part, layout)
    full = kept_bytes(part, layout, rows)
    policy = layout.recompute if part.output and part.kept_split + part.kept_whole else "none"
    boundary = kept_bytes(part, layout, rows, "every_layer") if policy != "none" else full
    kept = {"none": full, "every_layer": boundary, "sqrt": boundary}.get(policy)
    if kept is None:
        kept = kept_bytes(part, layout, rows, "selective")
    return PartBytes(dense, experts, kept, full, boundary, _gradient_bytes(part, layout, rows))


def activation_bytes(
    stage: Stage, parts: Sequence[PartBytes], recompute: str
) -> tuple[float, float]:
    """Bytes that a stage stores of a micro-batch, and the peak of recomputed activations.

    "sqrt" stores one of sqrt(L) blocks, and recomputes the activations of sqrt(L) blocks at a time
    (Chen et al. 2016).
    """
    kept = again = 0.0
    for count, part in zip(stage, parts, strict=True):
        if recompute == "sqrt" and count and part.kept < part.full:
            runs = max(round(math.sqrt(count)), 1)
            kept += runs * part.boundary
            again = max(again, -(-count // runs) * part.full)
        elif count:
            kept += count * part.kept
            again = max(again, part.full - part.kept)
    return kept, again


def held(layout: Layout, place: int) -> float:
    """The largest number of micro-batches whose activations a pipeline rank stores at a time.

    In units of all stages of a rank: a chunk of the interleaved schedule counts 1 / v. Equal to
    `tfdist.addons.monitoring.timeline.held_microbatches` per chunk, as a test checks.
    """
    p, m, v = layout.pipeline, layout.num_microbatches, layout.chunks
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "1f1b":
        return float(min(m, p - place))
    if layout.schedule == "zero-bubble":
        return float(min(m, p))
    return min(2 * (p - place - 1) + (v - 1) * p + 1, m * v) / v


def rank_memory(
    stages: Sequence[Stage],
    place: int,
    parts: Sequence[PartBytes],
    layout: Layout,
    machine: Machine,
) -> Memory:
    """Bytes of a rank at a position on the pipeline axis.

    States: Rajbhandari et al. 2020, "ZeRO", section 5. With P, G and S bytes of parameters, gradients
    and optimizer state, and N ranks to shard them: stage 1 reduces S to S / N, stage 2 also G to
    G / N, stage 3 also P to P / N. Without a master copy, and with one micro-step per step, stage 1
    shards gradients too, because they are reduce-scattered during the backward pass.

    Args:
        stages: Stages of the rank.
        place: Position of the rank on the axis.
        parts: Bytes and parameters of each part on the rank.
        layout: The layout.
        machine: The machine, for the bytes of a process, a group and a bucket, and `fragmentation`.
    """
    precision, sharers = layout.precision, layout.data * layout.context
    one_pass = layout.num_microbatches == 1 and layout.accumulation == 1
    dense = experts = largest = kept = again = gradient = 0.0
    for stage in stages:
        for count, part in zip(stage, parts, strict=True):
            if count:
                dense += count * part.dense
                experts += count * part.experts
                largest = max(largest, part.dense + part.experts)
                gradient = max(gradient, part.gradient)
        now, made = activation_bytes(stage, parts, layout.recompute)
        kept += now
        again = max(again, made)
    whole = dense + experts
    shared = dense / (sharers * layout.expert) + experts / sharers
    zero = layout.zero_stage if sharers * layout.expert > 1 else 0
    keras = precision.master == 0
    in_parts = zero >= 2 or (zero == 1 and one_pass and keras)
    gradients = precision.gradient * (shared if in_parts else whole)
    gathers_all = zero == 3 and layout.pipeline > 1 and keras
    copies = 0.0
    if precision.copy:
        # Released as gradients are computed; only the larger of the two counts.
        copied = precision.copy * (2 * largest if zero == 3 and not gathers_all else whole)
        copies = max(copied - gradients, 0.0) if one_pass else copied
    buffers = 0.0
    if sharers * layout.expert > 1 and keras:
        least = max(machine.bucket_bytes, precision.sent * largest / 4)
        bucket = min(least, precision.sent * dense)
        buffers = (2 if zero else 4) * bucket
    if gathers_all:
        buffers += precision.parameter * whole
    elif zero == 3:
        buffers += 2 * largest * (precision.parameter + precision.gradient)
    found = Memory(
        parameters=precision.parameter * (shared if zero == 3 else whole),
        copies=copies,
        gradients=gradients,
        optimizer=layout.state_bytes * (shared if zero else whole),
        activations=kept * held(layout, place),
        working=again + gradient,
        buffers=buffers,
        allocator=0.0,
        process=machine.base_bytes + machine.group_bytes * num_groups(layout),
        gradients_follow=one_pass and keras,
    )
    if machine.fragmentation == 1:
        return found
    asked = found.total - found.process
    return dataclasses.replace(found, allocator=(machine.fragmentation - 1) * asked)


def num_groups(layout: Layout) -> int:
    """The number of groups in which a rank has collectives: of each axis, of neighbors in a pipeline, and all."""
    sizes = (layout.data, layout.tensor, layout.context, layout.expert, layout.pipeline)
    axes = sum(size > 1 for size in sizes)
    return axes + (axes > 1) + (layout.pipeline > 2)


def _gradient_bytes(part: Part, layout: Layout, rows: float) -> float:
    """Bytes of the gradient at the start of a part's backward pass."""
    scale = rows / (layout.context if part.splits_tokens else 1)
    if part.float32_split:
        return scale * 4 * part.float32_split / layout.tensor
    return scale * layout.precision.activation * part.output
