"""Search for the fastest layouts that are valid for the model and fit into memory.

A layout is pruned if a lower bound excludes it from the best of all layouts and of its kind. The bound of time
is its arithmetic and its messages over the tensor, expert and context axes, split evenly over the stages, with
the smallest bubble of its schedule. The bound of memory is the states, and the activations of one micro-batch,
split likewise. Both are below the estimate, so the result equals that of an exhaustive search.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tfdist.addons.planner.estimates import Estimate, PartCosts, assemble, misfit, part_costs, tied
from tfdist.addons.planner.layouts import OPTIMIZERS, PRECISIONS, RECOMPUTE, Layout, state_bytes
from tfdist.addons.planner.machines import Machine
from tfdist.addons.planner.parts import Model
from tfdist.addons.planner.times import Ways
from tfdist.utils import checks

_AXES = ("data", "expert", "context", "pipeline", "tensor")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The options and limits of a search.

    Attributes:
        memory: Bytes that a rank may use; None for the machine's.
        axes: The axes that may have more than one rank.
        zero_stages: ZeRO stages.
        recompute: Recompute policies.
        schedules: Pipeline schedules.
        chunks: Stages per rank, for the interleaved schedule.
        dtype: As in `Layout`.
        optimizer: As in `Layout`.
        ema: As in `Layout`.
        compression: As in `Layout`.
        sequence_parallel: Values of `Layout.sequence_parallel`.
        accumulation: Steps whose gradients are accumulated before an update; None for any number.
        most_tensor: The largest tensor axis; None for no limit.
        most_rows: The largest number of rows of a micro-batch; None for no limit.

    Raises:
        ValueError: A name is unknown, or a list is empty.
    """

    memory: float | None = None
    axes: tuple[str, ...] = _AXES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zero-bubble")
    chunks: tuple[int, ...] = (2, 4)
    dtype: str = "float32"
    optimizer: str = "adam"
    ema: bool = False
    compression: float = 1.0
    sequence_parallel: tuple[bool, ...] = (False, True)
    accumulation: int | None = None
    most_tensor: int | None = None
    most_rows: int | None = None

    def __post_init__(self):
        checks.number("memory", self.memory, above=0, optional=True)
        choices = {
            "axes": _AXES,
            "zero_stages": (0, 1, 2, 3),
            "recompute": RECOMPUTE,
            "schedules": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
            "sequence_parallel": (False, True),
        }
        for name, known in choices.items():
            given = getattr(self, name)
            if not isinstance(given, tuple) or not given or not set(given) <= set(known):
                raise checks.refuse(name, given, f"a tuple of some of {', '.join(map(str, known))}")
        checks.integers("chunks", self.chunks, minimum=2)
        checks.one_of("dtype", self.dtype, PRECISIONS)
        checks.one_of("optimizer", self.optimizer, OPTIMIZERS)
        checks.boolean("ema", self.ema)
        checks.number("compression", self.compression, minimum=1)
        checks.integer("accumulation", self.accumulation, minimum=1, optional=True)
        checks.integer("most_tensor", self.most_tensor, minimum=1, optional=True)
        checks.integer("most_rows", self.most_rows, minimum=1, optional=True)


@dataclasses.dataclass(slots=True)
class Group:
    """Layouts that differ only in schedule and ZeRO stage.

    Attributes:
        sizes: Sizes of the axes, in the order of `tfdist.Mesh`.
        rows: Rows of a micro-batch.
        passes: Micro-batches of an update on a rank.
        recompute: Recompute policy.
        sequence_parallel: As in `Layout`.
        kind: The axes in use.
        dense: Parameters of dense layers, summed over all stages.
        experts: Parameters of experts, summed over all stages.
        kept: Lower bound of the activations of a micro-batch in all stages, in bytes.
        seconds: Arithmetic and messages of one micro-batch through all stages, in seconds.
        bound: Lower bound of the seconds of a step.
    """

    sizes: tuple[int, ...]
    rows: int
    passes: int
    recompute: str
    sequence_parallel: bool
    kind: str
    dense: float
    experts: float
    kept: float
    seconds: float
    bound: float

    def options(self, limits: Limits) -> Iterator[tuple[str, int, int]]:
        """Schedule, chunks and ZeRO stage of each of its layouts."""
        p = self.sizes[3]
        schedules: list[tuple[str, int]] = [("1f1b", 1)]
        if p > 1:
            schedules = [
                (schedule, chunks)
                for schedule in limits.schedules
                for chunks in (limits.chunks if schedule == "interleaved" else (1,))
                if schedule != "interleaved" or self.passes // (limits.accumulation or 1) % p == 0
            ]
        # A single rank has no other to shard states over.
        is_alone = self.sizes[0] * self.sizes[1] * self.sizes[2] == 1
        for schedule, chunks in schedules:
            for zero in (0,) if is_alone else limits.zero_stages:
                yield schedule, chunks, zero

    def layout(self, limits: Limits, schedule: str, chunks: int, zero: int) -> Layout:
        """The layout of the group with a schedule and a ZeRO stage."""
        p, steps = self.sizes[3], limits.accumulation or 1
        return dataclasses.replace(
            _layout(self.sizes),
            zero_stage=zero,
            recompute=self.recompute,
            schedule=schedule,
            chunks=chunks,
            num_microbatches=self.passes // steps if p > 1 else 1,
            accumulation=steps if p > 1 else self.passes,
            dtype=limits.dtype,
            optimizer=limits.optimizer,
            ema=limits.ema,
            compression=limits.compression,
            sequence_parallel=self.sequence_parallel,
        )


@dataclasses.dataclass
class Found:
    """The result of a search for one kind of layouts.

    Attributes:
        best: The estimate of the fastest layout that fits, or None.
        least: Lower bound of the memory of the pruned layouts, in bytes.
        binds: The largest kind of memory in `least`.
        closest: The estimate of the layout with the least memory among those that do not fit.
        why: The reason why no layout is valid for the model, as text; else None.
    """

    best: Estimate | None = None
    least: float = float("inf")
    binds: str = ""
    closest: Estimate | None = None
    why: str | None = None


class Search:
    """A search over all layouts of a number of ranks.

    Args:
        model: The model.
        machine: The machine.
        global_batch: Samples of an update.
        ranks: Number of ranks.
        limits: The options and limits.
        count: Number of best layouts to keep.

    Attributes:
        best: Estimates of the fastest layouts that fit, fastest first.
        kinds: The result for each kind of layouts.
        refused: By axis, the first reason why it cannot split the model.
        considered: Number of layouts.
        estimated: Number of layouts that were estimated instead of pruned.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        global_batch: int,
        ranks: int,
        limits: Limits,
        count: int,
    ):
        self._model, self._machine, self._limits = model, machine, limits
        self._batch, self._ranks, self._count = global_batch, ranks, count
        self._memory = machine.memory if limits.memory is None else limits.memory
        self._room = self._memory / (1 + machine.memory_margin) - machine.base_bytes
        self._costs: dict[tuple, tuple[list[PartCosts], Ways]] = {}
        self.best: list[Estimate] = []
        self.kinds: dict[str, Found] = {}
        self.refused: dict[str, str] = {}
        self.considered = self.estimated = 0

    def run(self) -> Search:
        """Run the search."""
        for group in sorted(self.groups(), key=lambda each: each.bound):
            found = self.kinds.setdefault(group.kind, Found())
            for schedule, chunks, zero in group.options(self._limits):
                self.considered += 1
                if not self._may_win(group, schedule, chunks, found):
                    continue
                if self._is_too_large(group, zero, found):
                    continue
                layout = group.layout(self._limits, schedule, chunks, zero)
                if misfit(self._model, layout, self._batch) is None:
                    self._take(found, self.estimate(layout))
        return self

    def every(self) -> Iterator[Layout]:
        """All layouts that are valid for the model and the batch, without pruning."""
        for group in self.groups():
            for schedule, chunks, zero in group.options(self._limits):
                layout = group.layout(self._limits, schedule, chunks, zero)
                if misfit(self._model, layout, self._batch) is None:
                    yield layout

    def groups(self) -> Iterator[Group]:
        """All groups of layouts that are valid for the model and the batch."""
        refused: dict[str, str] = {}
        divided: set[str] = set()
        for sizes in self._sizes():
            layout = _layout(sizes)
            if why := misfit(self._model, layout, self._batch):
                refused.setdefault(layout.kind, why)
                continue
            divided.add(layout.kind)
            per_rank, fixed = self._batch // (sizes[0] * sizes[1]), self._limits.accumulation
            parallel = self._limits.sequence_parallel if sizes[4] > 1 else (False,)
            for rows, policy, split in itertools.product(
                divisors(per_rank), self._limits.recompute, parallel
            ):
                passes = per_rank // rows
                if fixed is not None and (passes % fixed or (sizes[3] == 1 and passes != fixed)):
                    continue
                if rows <= (self._limits.most_rows or rows):
                    yield self._group(layout, sizes, rows, passes, policy, split)
        for kind in refused.keys() - divided:
            self.kinds[kind] = Found(why=refused[kind])

    def estimate(self, layout: Layout) -> Estimate:
        """The estimate of a layout."""
        self.estimated += 1
        rows = layout.microbatch_rows(self._batch)
        costs, ways = self._costs_of(layout, rows)
        return assemble(
            self._model, self._machine, layout, self._batch, self._memory, rows, ways, costs
        )

    def _sizes(self) -> Iterator[tuple[int, ...]]:
        """Sizes of the axes whose product is the number of ranks."""
        allowed = self._limits.axes

        def options(axis: str, left: int) -> Sequence[int]:
            if axis not in allowed:
                return (1,)
            found = []
            for ranks in divisors(left):
                why = self._model.divides(axis, ranks) if ranks > 1 else None
                if why is None:
                    found.append(ranks)
                else:
                    self.refused.setdefault(axis, f"{axis}={ranks}: {why}")
            return found

        for tensor in options("tensor", self._ranks):
            if tensor > (self._limits.most_tensor or tensor):
                continue
            for pipeline in options("pipeline", self._ranks // tensor):
                left = self._ranks // (tensor * pipeline)
                for context in options("context", left):
                    for expert in options("expert", left // context):
                        data = left // (context * expert)
                        if data == 1 or "data" in allowed:
                            yield data, expert, context, pipeline, tensor

    def _group(
        self,
        layout: Layout,
        sizes: tuple[int, ...],
        rows: int,
        passes: int,
        policy: str,
        split: bool,
    ) -> Group:
        changed = dataclasses.replace(
            layout,
            recompute=policy,
            sequence_parallel=split,
            dtype=self._limits.dtype,
            optimizer=self._limits.optimizer,
            ema=self._limits.ema,
        )
        costs = tied(self._model, changed, self._costs_of(changed, rows)[0])
        seconds = sum(part.count * part.times.total for part in costs)
        bound = passes * seconds / sizes[3]
        dense = sum(part.count * part.bytes.dense for part in costs)
        experts = sum(part.count * part.bytes.experts for part in costs)
        kept = sum(part.count * part.bytes.kept for part in costs) if policy != "sqrt" else 0.0
        return Group(
            sizes, rows, passes, policy, split, layout.kind, dense, experts, kept, seconds, bound
        )

    def _costs_of(self, layout: Layout, rows: int) -> tuple[list[PartCosts], Ways]:
        key = (
            *(layout.tensor, layout.context, layout.expert, rows),
            *(layout.recompute, layout.sequence_parallel),
        )
        if key not in self._costs:
            ways = Ways(layout, self._machine)
            self._costs[key] = (
                [part_costs(part, layout, rows, self._machine, ways) for part in self._model.parts],
                ways,
            )
        costs, _ = self._costs[key]
        return costs, Ways(layout, self._machine)

    def _may_win(self, group: Group, schedule: str, chunks: int, found: Found) -> bool:
        p, m = group.sizes[3], group.passes
        waits = 0.0 if schedule == "zero-bubble" else (p - 1) / chunks
        least = (m + waits) * group.seconds / p
        if len(self.best) < self._count or least <= self.best[-1].step_seconds:
            return True
        return found.best is None or least <= found.best.step_seconds

    def _is_too_large(self, group: Group, zero: int, found: Found) -> bool:
        data, expert, context, pipeline, _ = group.sizes
        precision, sharers = PRECISIONS[self._limits.dtype], data * context
        limits = self._limits
        state = state_bytes(limits.optimizer, limits.dtype, ema=limits.ema)
        whole = group.dense + group.experts
        shared = group.dense / (sharers * expert) + group.experts / sharers
        kinds = {
            "optimizer": state * (shared if zero else whole) / pipeline,
            "parameters": precision.parameter * (shared if zero == 3 else whole) / pipeline,
            "activations": group.kept / pipeline,
        }
        asked = self._machine.fragmentation * sum(kinds.values())
        if asked <= self._room:
            return False
        least = asked + self._machine.base_bytes
        if least < found.least:
            found.least, found.binds = least, max(kinds, key=lambda kind: kinds[kind])
        return True

    def _take(self, found: Found, estimate: Estimate) -> None:
        if not estimate.fits:
            if found.closest is None or estimate.memory.total < found.closest.memory.total:
                found.closest = estimate
            return
        if found.best is None or _key(estimate) < _key(found.best):
            found.best = estimate
        self.best.append(estimate)
        self.best.sort(key=_key)
        del self.best[self._count :]


def _layout(sizes: tuple[int, ...]) -> Layout:
    data, expert, context, pipeline, tensor = sizes
    return Layout(data, expert, context, pipeline, tensor)


def _key(estimate: Estimate) -> tuple[float, float, str]:
    """The sort key: time, then memory, then description."""
    return (estimate.step_seconds, estimate.memory.total, estimate.layout.words())


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]
