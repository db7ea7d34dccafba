"""Discrete-event simulation of a step: pipeline schedules, collectives by hop, and slow ranks.

`tfdist.addons.planner.estimate` uses formulas instead; tests compare both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.addons.planner.communication import Way, send
from tfdist.addons.planner.estimates import estimate, part_costs
from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import Link, Machine
from tfdist.addons.planner.parts import Model
from tfdist.addons.planner.stages import cut
from tfdist.addons.planner.times import PassTimes, Ways
from tfdist.pipeline.schedules import Action, Schedule, make_schedule
from tfdist.pipeline.simulation import needs
from tfdist.utils import checks

#: The most forward passes of a simulated schedule, which take half a minute.
_MOST_FORWARDS = 1 << 18
_MOST_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """The result of a simulated step.

    Attributes:
        seconds: Duration of the step.
        passes: Seconds until the last rank of the pipeline has completed its passes.
        bubble: The share of `passes` in which ranks wait, averaged over ranks.
        gradients: Exposed seconds of the gradients' communication, as in `estimate`.
        straggler: Additional seconds by slow ranks and jitter.
    """

    seconds: float
    passes: float
    bubble: float
    gradients: float
    straggler: float


def play(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float],
    weights: Sequence[float], hop: float,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Simulate a pipeline: the time at which each rank ends, and its busy time, in seconds.

    Args:
        schedule: The schedule.
        forward: Seconds of each stage's forward pass.
        backward: Seconds of each stage's backward pass, including gradients of weights.
        weights: Seconds of the gradients of weights, which the zero-bubble schedule separates.
        hop: Seconds of a message between ranks, during which ranks can compute.

    Raises:
        ValueError: The schedule deadlocks.
    """
    done: dict[Action, float] = {}
    at = [0] * schedule.num_ranks
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    last = {Action.FORWARD: forward, Action.WEIGHT: weights}
    left = sum(map(len, schedule.actions))
    while left:
        before = left
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                begin = free[rank]
                for needed in needs(action, schedule):
                    end = done.get(needed)
                    if end is None:
                        begin = -1.0
                        break
                    if schedule.rank_of(needed.stage) != rank:
                        end += hop
                    begin = max(begin, end)
                if begin < 0:
                    break
                if action.kind == Action.BACKWARD:
                    seconds = backward[action.stage]
                    seconds -= weights[action.stage] if schedule.splits_backward else 0.0
                else:
                    seconds = last[action.kind][action.stage]
                done[action] = free[rank] = begin + seconds
                busy[rank] += seconds
                at[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(f"Schedule {schedule.name!r} deadlocks and cannot be simulated.")
    return free, busy


def ring_events(size: float, starts: np.ndarray, links: Sequence[Link] | Link) -> np.ndarray:
    """Simulate a ring all-reduce: the time at which each rank has the sum, in seconds.

    In each of 2 (n - 1) rounds a rank sends S / n bytes to the next, after it has received those of
    the previous round. A late rank or a slow link therefore delays the others.

    Args:
        size: Bytes of the tensor.
        starts: The time at which each rank starts, in seconds.
        links: The link from each rank to the next, or one link for all.
    """
    ranks = len(starts)
    if ranks == 1:
        return np.array(starts, float)
    each = [links] * ranks if isinstance(links, Link) else links
    latency = np.array([link.latency for link in each])
    carried = np.array([size / ranks / link.bandwidth for link in each])
    ready = np.array(starts, float)
    free = np.zeros(ranks)
    for _ in range(2 * (ranks - 1)):
        # A rank sends as soon as it has its piece and its link is free.
        free = np.maximum(ready, free) + carried
        ready = np.maximum(ready, np.roll(free + latency, 1))
    return ready


def tree_events(size: float, starts: np.ndarray, link: Link, pieces: int = 64) -> np.ndarray:
    """Simulate a pipelined tree all-reduce: the time at which each rank has the sum, in seconds.

    Two trees share the bytes (Sanders, Speck and Traff 2009), so each moves S / 2.

    Args:
        size: Bytes of the tensor.
        starts: The time at which each rank starts, in seconds.
        link: The link between any two ranks.
        pieces: Number of pieces that the bytes are split into.
    """
    ready = np.array(starts, float)
    ranks = len(ready)
    piece = size / 2 / pieces / link.bandwidth
    parents = (np.arange(1, ranks) - 1) // 2
    for child in range(ranks - 1, 0, -1):
        parent = parents[child - 1]
        ready[parent] = max(ready[parent], ready[child] + link.latency + piece)
    # A parent receives a piece from each of two children while it sends one.
    ready[0] += 2 * (pieces - 1) * piece
    for child in range(1, ranks):
        ready[child] = ready[parents[child - 1]] + link.latency + piece
    return ready + 2 * (pieces - 1) * piece


def two_level_events(size: float, starts: np.ndarray, group: Way) -> np.ndarray:
    """Simulate an all-reduce by rings within and between hosts: when each rank has the sum."""
    starts = np.asarray(starts, float)
    members, hosts = group.members, len(starts) // group.members
    if group.between is None or hosts < 2:
        return ring_events(size, starts, group.inside)
    # A reduce-scatter is the first half of a ring, the all-gather its second.
    hop = group.inside.latency + size / members / group.inside.bandwidth
    half = (members - 1) * hop
    inner = starts.reshape(hosts, members).max(axis=1) + half
    return np.repeat(ring_events(size, inner, group.between) + half, members)


def simulate_step(
    model: Model,
    machine: Machine,
    layout: Layout,
    *,
    global_batch: int,
    jitter: float = 0.0,
    slow_ranks: int = 0,
    slowness: float = 1.5,
    seed: int = 0,
) -> SimulatedStep:
    """Simulate a step: a pipeline of each distinct speed, then the all-reduce over replicas.

    The time of each replica has random jitter, and some replicas have slow ranks. A pipeline is as
    slow as its slowest tensor rank, and the all-reduce of gradients waits for the last replica.

    Args:
        model: The model.
        machine: The machine.
        layout: The layout, of at most a million ranks.
        global_batch: Samples of an update.
        jitter: Standard deviation of a replica's time, relative to it.
        slow_ranks: Number of slow ranks, each assigned to a random replica and pipeline rank.
        slowness: Factor of their time.
        seed: Seed of the random numbers.

    Raises:
        ValueError: As for `estimate`, or the schedule is too long to simulate.
    """
    found = estimate(model, machine, layout, global_batch=global_batch)
    checks.number("jitter", jitter, minimum=0, below=1)
    checks.integer("slow_ranks", slow_ranks, minimum=0, maximum=_MOST_RANKS)
    checks.number("slowness", slowness, minimum=1)
    checks.integer("seed", seed, minimum=0)
    p, passes = layout.pipeline, layout.num_microbatches
    if p * passes * layout.chunks > _MOST_FORWARDS:
        raise ValueError(
            f"A simulated schedule must have at most {_MOST_FORWARDS:,} forward passes. Received: "
            f"pipeline={p}, num_microbatches={passes}, chunks={layout.chunks}."
        )
    rows = layout.microbatch_rows(global_batch)
    ways = Ways(layout, machine)
    parts = [part_costs(part, layout, rows, machine, ways) for part in model.parts]
    totals = [part.times.total for part in parts]
    stages = cut([part.count for part in parts], totals, p * layout.chunks)
    times = []
    for stage in stages:
        each = PassTimes()
        for count, part in zip(stage, parts, strict=True):
            each = each.plus(part.times, count)
        times.append(each)
    # Exposed messages count for the pass that waits for them; of a context axis, the forward pass has one third.
    forward = [t.forward + t.tensor / 2 + t.expert / 2 + t.context / 3 for t in times]
    backward = [t.total - f for t, f in zip(times, forward, strict=True)]
    weights = [t.weights for t in times]
    hop = 0.0
    if p > 1:
        split = layout.split_messages or layout.sequence_parallel
        largest = max(model.parts, key=lambda part: part.output)
        tokens = rows / (layout.context if largest.splits_tokens else 1)
        size = tokens * largest.output * layout.precision.activation
        hop = send(size / (layout.tensor if split else 1), ways["pipeline",].slowest)
    schedule = make_schedule(
        layout.schedule, p, passes, layout.chunks if layout.chunks > 1 else None
    )

    def passes_of(slow: tuple[int, ...]) -> tuple[float, float]:
        factors = [slowness if stage % p in slow else 1.0 for stage in range(p * layout.chunks)]
        ends, busy = play(
            schedule,
            [a * b for a, b in zip(forward, factors, strict=True)],
            [a * b for a, b in zip(backward, factors, strict=True)],
            [a * b for a, b in zip(weights, factors, strict=True)],
            hop,
        )
        span = layout.accumulation * max(ends)
        return span, 1 - layout.accumulation * sum(busy) / (p * span)

    draw = np.random.default_rng(seed)
    even, bubble = passes_of(())
    replicas = layout.data * layout.expert * layout.context
    ends = np.full(replicas, even)
    slow: dict[int, set[int]] = {}
    for _ in range(slow_ranks):
        slow.setdefault(int(draw.integers(replicas)), set()).add(int(draw.integers(p)))
    known: dict[tuple[int, ...], float] = {}
    for replica, places in slow.items():
        key = tuple(sorted(places))
        if key not in known:
            known[key] = passes_of(key)[0]
        ends[replica] = known[key]
    ends *= np.maximum(1 + jitter * draw.standard_normal(replicas), 0.1)
    # The exposed time of gradients is that of the estimate; the delay of late replicas is added to it.
    shown = found.seconds["gradients"]
    rest = shown + found.seconds["optimizer"] + found.seconds["other"]
    last = float(ends.max())
    return SimulatedStep(
        seconds=last + rest,
        passes=even,
        bubble=bubble,
        gradients=shown,
        straggler=last - even,
    )
