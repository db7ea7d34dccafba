"""Time and traffic of a step, by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.addons.planner import communication
from tfdist.addons.planner.communication import Way, way
from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import Link, Machine
from tfdist.addons.planner.memory import kept_bytes
from tfdist.addons.planner.parts import Part


@dataclasses.dataclass(frozen=True, slots=True)
class PassTimes:
    """Time and traffic of a micro-batch in a stage, or in a part of it.

    Times are in seconds, traffic is in bytes that the rank sends.

    Attributes:
        forward: Arithmetic of the forward pass.
        backward: Arithmetic of the backward pass, including recompute.
        weights: The part of `backward` that computes gradients of weights.
        tensor: Collectives over the tensor axis, forward and backward.
        expert: All-to-alls over the expert axis, forward and backward.
        context: Exposed messages of keys and values over the context axis.
        latency: The latency in these three, during which the processor is free for other ranks.
        tensor_bytes: Traffic over the tensor axis.
        expert_bytes: Traffic over the expert axis.
        context_bytes: Traffic over the context axis.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    latency: float = 0.0
    tensor_bytes: float = 0.0
    expert_bytes: float = 0.0
    context_bytes: float = 0.0

    def plus(self, other: PassTimes, count: int = 1) -> PassTimes:
        """The sum of this and `count` times another."""
        return PassTimes(
            self.forward + count * other.forward,
            self.backward + count * other.backward,
            self.weights + count * other.weights,
            self.tensor + count * other.tensor,
            self.expert + count * other.expert,
            self.context + count * other.context,
            self.latency + count * other.latency,
            self.tensor_bytes + count * other.tensor_bytes,
            self.expert_bytes + count * other.expert_bytes,
            self.context_bytes + count * other.context_bytes,
        )

    @property
    def arithmetic(self) -> float:
        """Seconds of arithmetic, forward and backward."""
        return self.forward + self.backward

    @property
    def messages(self) -> float:
        """Seconds of exposed communication."""
        return self.tensor + self.expert + self.context

    @property
    def total(self) -> float:
        """Seconds of arithmetic and communication."""
        return self.forward + self.backward + self.tensor + self.expert + self.context


class Ways:
    """The links of a layout's groups, computed on first use."""

    def __init__(self, layout: Layout, machine: Machine):
        self._layout, self._machine = layout, machine
        self._found: dict[tuple[str, ...], Way] = {}

    def __getitem__(self, axes: tuple[str, ...]) -> Way:
        if axes not in self._found:
            self._found[axes] = way(self._layout, axes, self._machine)
        return self._found[axes]


def part_times(part: Part, layout: Layout, rows: float, machine: Machine, ways: Ways) -> PassTimes:
    """Time and traffic of one repetition of a part, for a micro-batch.

    Arithmetic is FLOPs divided by the rate of products, plus the bytes that other operations move
    divided by the memory bandwidth: twice the stored activations forward (one write, one read), and
    twice that backward. Products of the backward pass require twice the FLOPs of the forward pass,
    one half for inputs and one for weights. The tensor axis has two all-reduces of s b h elements
    per block and direction (Shoeybi et al. 2019, Megatron-LM); the expert axis two all-to-alls per
    direction (Lepikhin et al. 2020, GShard); the context axis, a ring of c ranks, sends keys and
    values c - 1 times forward, and with their gradients twice that backward (Liu et al. 2023, Ring
    Attention).
    """
    t, c = layout.tensor, layout.context
    tokens = rows / (c if part.splits_tokens else 1)
    rate = machine.rate(layout.precision.compute)
    memory_rate = machine.memory_bandwidth * machine.memory_efficiency
    products = tokens * part.flops / t / rate
    core = tokens * part.attention_flops / t / rate
    moved = 2 * kept_bytes(part, layout, rows) / memory_rate
    forward = machine.layer_seconds + products + core + moved
    backward = machine.layer_seconds + 2 * products + part.attention_backward * core + 2 * moved
    sums = 2 * part.tensor_sums
    if layout.recompute in ("every_layer", "sqrt") and part.kept_split + part.kept_whole:
        if part.output:
            backward += forward
            if layout.recompute_messages:
                sums += part.tensor_sums
            else:
                backward -= tokens * part.last_flops / t / rate
    elif layout.recompute == "selective" and part.attention_flops:
        selective = kept_bytes(part, layout, rows, "selective")
        backward += core + moved - 2 * selective / memory_rate
    width = layout.precision.activation
    tensor = tensor_bytes = expert = expert_bytes = context = context_bytes = latency = 0.0
    if t > 1 and sums:
        size = tokens * part.output * width
        tensor = sums * communication.all_reduce(size, ways["tensor",], machine.algorithm)
        latency += sums * communication.all_reduce(0.0, ways["tensor",], machine.algorithm)
        tensor_bytes = sums * 2 * (t - 1) / t * size
    if layout.expert > 1 and part.exchanged:
        size = tokens * part.exchanged * width
        expert = 4 * communication.all_to_all(size, ways["expert",])
        latency += 4 * communication.all_to_all(0.0, ways["expert",])
        expert_bytes = 4 * (layout.expert - 1) / layout.expert * size
    if c > 1 and part.keys_values:
        size = tokens * part.keys_values * width / t
        hop = communication.send(size, ways["context",].slowest)
        sent = 3 * (c - 1) * hop
        context = sent - machine.overlap * min(sent, (1 + part.attention_backward) * core)
        latency += min(3 * (c - 1) * ways["context",].slowest.latency, context)
        context_bytes = 3 * (c - 1) * size
    return PassTimes(
        forward, backward, products, tensor, expert, context, latency,
        tensor_bytes, expert_bytes, context_bytes,
    )  # fmt: skip


def pipeline_seconds(layout: Layout, times: Sequence[PassTimes], hop: float) -> float:
    """Seconds of a step's passes through a pipeline.

    With p ranks, m micro-batches, v chunks, and a rank's seconds F forward, B backward and W of B
    for weights: 1F1B and GPipe cost the sum over ranks of F + B for the first micro-batch, and then
    the longest F + B for each that follows (Narayanan et al. 2021, section 2.2); the interleaved
    schedule 1 / v of the sum (same); ZB-H1 hides (p - 1) W more (Qi et al. 2023, table 2). The first
    micro-batch adds two hops for each rank after the first. In steady state a rank waits for
    2 (p - 1) / p hops per micro-batch, because there are only p micro-batches in flight.
    Tests compare the result with `tfdist.addons.planner.simulation`, which runs the schedules.

    Args:
        layout: The layout.
        times: Times of each rank of the axis, for a micro-batch and all stages of the rank.
        hop: Seconds of a message to the next rank.
    """
    p, m, v = layout.pipeline, layout.num_microbatches, layout.chunks
    totals = [each.total for each in times]
    if p == 1:
        return layout.accumulation * totals[0]
    longest, mean = max(totals), sum(totals) / p
    waits = 2 * (p - 1) / p * hop
    if layout.schedule == "gpipe":
        span = sum(totals) + (m - 1) * longest + 2 * (p - 1) * hop
    elif layout.schedule == "interleaved":
        # More chunks than ranks are in flight, so that messages overlap in steady state.
        span = m * longest + (p - 1) * (mean / v + 2 * hop)
    else:
        span = sum(totals) + (m - 1) * (longest + waits) + 2 * (p - 1) * hop
        if layout.schedule == "zero-bubble":
            # Gradients of weights fill the bubble of 1F1B with W of all ranks but one, twice: they are
            # off the critical path of the backward pass, and ranks compute them instead of waiting.
            hidden = sum(each.weights for each in times) * (p - 1) / p
            span = max(span - 2 * hidden * min(m / p, 1.0), m * longest)
    return layout.accumulation * span


def gradient_seconds(
    dense: float,
    experts: float,
    layout: Layout,
    machine: Machine,
    ways: Ways,
    window: float,
    shared: float = 1.0,
) -> tuple[float, float]:
    """Exposed seconds, and traffic in bytes, of gradients and parameters on the data axes.

    An all-reduce moves 2 (n - 1) / n of the gradients' bytes; so do the reduce-scatter and
    all-gather of ZeRO 1 and 2; ZeRO 3 gathers parameters twice and scatters gradients once
    (Rajbhandari et al. 2020, section 7), in each micro-step. In a pipeline it gathers a rank's
    stages once, before a step's schedule begins. The overlap with the backward pass is not perfect,
    because communication and compute slow each other: of the shorter of both only the machine's
    share `overlap` is hidden.

    Args:
        dense: Parameters of dense layers on the rank.
        experts: Parameters of experts on the rank.
        layout: The layout.
        machine: The machine.
        ways: The links.
        window: Seconds of the backward pass of the last micro-batch.
        shared: Number of ranks that share a processor, which moves the bytes of each.
    """
    precision, micro = layout.precision, layout.accumulation
    seconds = shown = sent = 0.0
    for parameters, axes in (
        (dense, ("context", "expert", "data")),
        (experts, ("context", "data")),
    ):
        ranks = layout.data * layout.context * (layout.expert if "expert" in axes else 1)
        if ranks == 1 or not parameters:
            continue
        group = ways[axes]
        once = 0.0
        if group.between is None:
            link = machine.inside
            if machine.bulk is not None:
                # The measured latency is that of a whole all-reduce, whatever the number of hops.
                once, link = machine.bulk.latency / 2, Link(0.0, machine.bulk.bandwidth)
            link = Link(link.latency, link.bandwidth / shared)
            group = Way(group.ranks, group.members, link, None, link)
        gradients = parameters * precision.sent / layout.compression
        gathered = parameters * (precision.copy or precision.parameter)
        share = (ranks - 1) / ranks
        if layout.zero_stage == 0:
            seconds += 2 * once + communication.all_reduce(gradients, group, machine.algorithm)
            sent += 2 * share * gradients
            continue
        scatter = once + communication.all_gather(gradients, group)
        gather = once + communication.all_gather(gathered, group)
        times = micro if layout.zero_stage >= 2 else 1
        # The all-gather of stages 1 and 2 precedes a step's first layer, and nothing hides it; in
        # stage 3 a layer is gathered while the previous one computes.
        seconds += times * scatter
        sent += times * share * gradients
        if layout.zero_stage == 3 and layout.pipeline > 1:
            # All stages of a rank are gathered before the schedule begins, and nothing hides it.
            shown += micro * gather
            sent += micro * share * gathered
        elif layout.zero_stage == 3:
            seconds += 2 * micro * gather
            sent += 2 * micro * share * gathered
        else:
            shown += gather
            sent += share * gathered
    if layout.zero_stage >= 2:
        window *= micro
    if layout.zero_stage == 3 and layout.pipeline == 1:
        window *= 1.5  # Forward passes hide all-gathers, too.
    hidden = machine.overlap * min(seconds, window)
    return seconds - hidden + shown, sent
