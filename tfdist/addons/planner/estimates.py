"""The cost of a layout: memory, traffic and time of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.addons.planner import communication
from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import Machine
from tfdist.addons.planner.memory import Memory, PartBytes, part_bytes, rank_memory
from tfdist.addons.planner.parts import (
    Model,
    Part,
    check_model,
    count_active_parameters,
    count_parameters,
    training_flops,
)
from tfdist.addons.planner.quantities import as_count, as_seconds
from tfdist.addons.planner.stages import Stage, cut, of_rank
from tfdist.addons.planner.times import (
    PassTimes,
    Ways,
    gradient_seconds,
    part_times,
    pipeline_seconds,
)
from tfdist.utils import checks
from tfdist.utils.quantities import as_bytes

#: Estimates more than this factor beyond the calibrated range are marked as extrapolated.
EXTRAPOLATED = 4.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a step of a layout.

    Attributes:
        layout: The layout.
        global_batch: Samples of a step.
        parameters: Parameters of the model.
        active_parameters: Parameters that a token uses; of a mixture of experts those of `top_k`.
        flops: Model FLOPs of a step, summed over layers.
        memory: Bytes of the rank with the highest peak.
        memory_limit: Bytes that a rank may use.
        traffic: Bytes that a rank sends in a step, by axis.
        seconds: Seconds of a step by kind: "compute"; "tensor", "expert", "context" and "gradients"
            for exposed communication; "bubble"; "optimizer"; "other".
        peak: Peak FLOP/s of all ranks.
        tokens: Tokens of a step; its samples for models without tokens.
        memory_margin: As in `Machine`.
        extrapolated: Descriptions of the figures more than 4 times beyond the calibrated range.
    """

    layout: Layout
    global_batch: int
    parameters: float
    active_parameters: float
    flops: float
    memory: Memory
    memory_limit: float
    traffic: dict[str, float]
    seconds: dict[str, float]
    peak: float
    tokens: int
    memory_margin: float = 0.0
    extrapolated: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        """Whether the rank with the highest peak stays below the memory limit."""
        return self.memory.total * (1 + self.memory_margin) <= self.memory_limit

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of all ranks' peak (Chowdhery et al. 2022)."""
        return self.flops / (self.step_seconds * self.peak)

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks wait in the pipeline."""
        return self.seconds["bubble"] / self.step_seconds

    @property
    def flops_6nd(self) -> float:
        """FLOPs of a step by 6 N D: 6 for each active parameter and token (Kaplan et al. 2020)."""
        return 6.0 * self.active_parameters * self.tokens

    @property
    def binding(self) -> str:
        """The limiting term: the largest kind of memory if it does not fit, else of overhead."""
        if not self.fits:
            kind = self.memory.largest
            return f"memory, {kind} {as_bytes(getattr(self.memory, kind))}"
        overhead = {kind: each for kind, each in self.seconds.items() if kind != "compute"}
        kind = max(overhead, key=lambda name: overhead[name])
        return f"{kind} {as_seconds(overhead[kind])} of {as_seconds(self.step_seconds)}"

    def __str__(self) -> str:
        mark = f" (extrapolated: {'; '.join(self.extrapolated)})" if self.extrapolated else ""
        return (
            f"{self.layout.words()}: {as_seconds(self.step_seconds)} per step{mark}, MFU "
            f"{self.mfu:.1%}, {as_bytes(self.memory.total)} of {as_bytes(self.memory_limit)} per rank, "
            f"{as_count(self.parameters)} parameters"
        )


def misfit(model: Model, layout: Layout, global_batch: int) -> str | None:
    """The reason why a layout cannot train a model, as text; None if it can."""
    for axis in ("tensor", "pipeline", "expert", "context"):
        ranks = getattr(layout, axis)
        if axis == "pipeline":
            ranks *= layout.chunks
        if ranks > 1 and (why := model.divides(axis, ranks)):
            return f"{axis}={getattr(layout, axis)}: {why}"
    parts = layout.data * layout.expert * layout.num_microbatches * layout.accumulation
    if global_batch % parts:
        return f"global_batch={global_batch} is not divisible by {parts}"
    return None


def estimate(
    model: Model,
    machine: Machine,
    layout: Layout,
    *,
    global_batch: int,
    memory: float | None = None,
) -> Estimate:
    """Estimate the cost of a training step.

    Args:
        model: The model.
        machine: The machine.
        layout: The layout of the model over the machine's ranks.
        global_batch: Samples of an update, over all ranks.
        memory: Bytes that a rank may use; None for the machine's.

    Raises:
        ValueError: The model or the batch is not divisible as the layout requires.
    """
    check_model(model)
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    checks.instance("layout", layout, Layout, "a tfdist.addons.planner.Layout")
    checks.integer("global_batch", global_batch, minimum=1)
    checks.number("memory", memory, above=0, optional=True)
    why = misfit(model, layout, global_batch)
    if why is not None:
        raise ValueError(f"`layout` cannot split the model or the batch. Received: {why}.")
    rows = layout.microbatch_rows(global_batch)
    ways = Ways(layout, machine)
    parts = [part_costs(part, layout, rows, machine, ways) for part in model.parts]
    return assemble(model, machine, layout, global_batch, memory, rows, ways, parts)


@dataclasses.dataclass(frozen=True, slots=True)
class PartCosts:
    """Time and memory of a part, for a micro-batch."""

    count: int
    flops: float
    times: PassTimes
    bytes: PartBytes


def part_costs(part: Part, layout: Layout, rows: int, machine: Machine, ways: Ways) -> PartCosts:
    """The cost of a part; of the layout only the tensor, expert and context axes matter."""
    return PartCosts(
        part.count,
        rows * (part.flops + part.attention_flops) / (layout.tensor * layout.context),
        part_times(part, layout, rows, machine, ways),
        part_bytes(part, layout, rows),
    )


def tied(model: Model, layout: Layout, parts: Sequence[PartCosts]) -> list[PartCosts]:
    """The costs of parts, with shared parameters counted once without a pipeline."""
    *others, last = parts
    if layout.pipeline == 1 and model.shared_parameters:
        dense = last.bytes.dense - model.shared_parameters / layout.tensor
        last = dataclasses.replace(last, bytes=dataclasses.replace(last.bytes, dense=dense))
    return [*others, last]


def assemble(
    model: Model,
    machine: Machine,
    layout: Layout,
    global_batch: int,
    memory: float | None,
    rows: int,
    ways: Ways,
    parts: Sequence[PartCosts],
) -> Estimate:
    """Combine the costs of parts into the estimate of a layout; see `estimate`."""
    p = layout.pipeline
    parts = tied(model, layout, parts)
    totals = [part.times.total for part in parts]
    stages = cut([part.count for part in parts], totals, p * layout.chunks)
    of_ranks = [of_rank(stages, place, p) for place in range(p)]
    # Most ranks have equal stages, whose sum is computed once.
    by_counts: dict[Stage, PassTimes] = {}
    counts = [tuple(map(sum, zip(*each, strict=True))) for each in of_ranks]
    for each in counts:
        if each not in by_counts:
            by_counts[each] = _sum(each, parts)
    rank_times = [by_counts[each] for each in counts]
    hop, hop_bytes = _hop(model, layout, rows, machine, ways)
    span = pipeline_seconds(layout, rank_times, hop)
    slowest = max(range(p), key=lambda place: rank_times[place].total)
    busy = rank_times[slowest]
    shared = _sharing(layout, machine)
    dense, experts = _parameters(counts[slowest], parts)
    shown, sent = gradient_seconds(dense, experts, layout, machine, ways, busy.backward, shared)
    # First and last stage sum the gradients of shared parameters after the last micro-batch.
    tied_bytes = 0.0
    if p > 1 and model.shared_parameters:
        tied_bytes = model.shared_parameters / layout.tensor * layout.precision.sent
        shown += communication.send(tied_bytes, ways["pipeline",].slowest)
    most = max(set(counts), key=lambda each: sum(_parameters(each, parts)))
    update = _update_seconds(*_parameters(most, parts), layout, machine)
    passes = layout.accumulation * layout.num_microbatches
    if not layout.precision.master:
        # Keras adds a pass's gradients to those before: two are read, one is written. With a master copy
        # the products accumulate them.
        added = 3 * (passes - 1) * layout.precision.gradient * (dense + experts)
        update += added / (machine.memory_bandwidth * machine.memory_efficiency)
    compute, messages = passes * busy.arithmetic, passes * busy.messages
    # Ranks that share a processor compute and move the bytes of messages in turn. During the latency of
    # messages the processor is free.
    turns, crowded = 0.0, shared ** (1 + machine.crowding)
    if shared > 1:
        work = sum(each.total - each.latency for each in rank_times) / p
        waits = sum(each.latency for each in rank_times) / p
        if p > 1:
            latency = ways["pipeline",].slowest.latency
            work += 2 * (p - 1) / p * (hop - latency)
            waits += 2 * (p - 1) / p * latency
        turns = max(passes * (crowded * work + waits) - span, 0.0)
    seconds = {
        "compute": compute + turns,
        "tensor": passes * busy.tensor,
        "expert": passes * busy.expert,
        "context": passes * busy.context,
        "bubble": max(span - compute - messages, 0.0),
        "gradients": shown,
        "optimizer": crowded * update,
        "other": machine.step_seconds,
    }
    # A rank sends the output and the gradient of each micro-batch; of two ranks each sends only one of them.
    hops = 0 if p == 1 else 1 if p == 2 and layout.chunks == 1 else 2
    traffic = {
        "data": sent,
        "tensor": passes * busy.tensor_bytes,
        "expert": passes * busy.expert_bytes,
        "context": passes * busy.context_bytes,
        "pipeline": hops * passes * layout.chunks * hop_bytes + tied_bytes,
    }
    held_bytes = [part.bytes for part in parts]
    memories = [
        rank_memory(of_ranks[place], place, held_bytes, layout, machine)
        for place in {0, p - 1, slowest}
    ]
    return Estimate(
        layout=layout,
        global_batch=global_batch,
        parameters=count_parameters(model),
        active_parameters=count_active_parameters(model),
        flops=global_batch * training_flops(model),
        memory=max(memories, key=lambda each: each.total),
        memory_limit=machine.memory if memory is None else memory,
        traffic=traffic,
        seconds=seconds,
        peak=layout.ranks * machine.flops[layout.precision.compute],
        tokens=global_batch * model.tokens,
        memory_margin=machine.memory_margin,
        extrapolated=_extrapolated(machine, layout, parts, dense + experts)
        if machine.calibrated
        else (),
    )


def _extrapolated(
    machine: Machine, layout: Layout, parts: Sequence[PartCosts], parameters: float
) -> tuple[str, ...]:
    """Descriptions of the figures more than `EXTRAPOLATED` times beyond the calibrated range."""
    here = {
        "ranks": float(layout.ranks),
        "layer FLOPs": max(part.flops for part in parts),
        "message bytes": parameters * layout.precision.sent if layout.data > 1 else 0.0,
    }
    return tuple(
        f"{what} {as_count(here[what])}, calibrated to {as_count(most)}"
        for what, most in machine.calibrated.items()
        if here.get(what, 0.0) > EXTRAPOLATED * most
    )


def _sum(counts: Stage, parts: Sequence[PartCosts]) -> PassTimes:
    found = PassTimes()
    for count, part in zip(counts, parts, strict=True):
        if count:
            found = found.plus(part.times, count)
    return found


def _parameters(counts: Stage, parts: Sequence[PartCosts]) -> tuple[float, float]:
    pairs = list(zip(counts, parts, strict=True))
    return (
        sum(count * part.bytes.dense for count, part in pairs),
        sum(count * part.bytes.experts for count, part in pairs),
    )


def _hop(
    model: Model, layout: Layout, rows: int, machine: Machine, ways: Ways
) -> tuple[float, float]:
    """Seconds and bytes of a message between stages."""
    if layout.pipeline == 1:
        return 0.0, 0.0
    part = max(model.parts, key=lambda each: each.output)
    tokens = rows / (layout.context if part.splits_tokens else 1)
    split = layout.split_messages or layout.sequence_parallel
    size = tokens * part.output * layout.precision.activation / (layout.tensor if split else 1)
    seconds = communication.send(size, ways["pipeline",].slowest)
    if split and layout.tensor > 1:
        seconds += communication.all_gather(size * layout.tensor, ways["tensor",])
    return seconds, size


def _sharing(layout: Layout, machine: Machine) -> float:
    """The number of a host's ranks per processor, at least 1."""
    on_host = min(machine.ranks_per_host, layout.ranks)
    return max(on_host / (machine.processors or on_host), 1.0)


def _update_seconds(dense: float, experts: float, layout: Layout, machine: Machine) -> float:
    """Seconds to read and write optimizer state and parameters, and to read gradients."""
    if layout.zero_stage:
        sharers = layout.data * layout.context
        dense, experts = dense / (sharers * layout.expert), experts / sharers
    precision = layout.precision
    moved = 2 * (layout.state_bytes + precision.parameter) + precision.gradient
    return (dense + experts) * moved / (machine.memory_bandwidth * machine.memory_efficiency)
