"""`plan`: the fastest layouts, and the reasons against others."""

from __future__ import annotations

import dataclasses

from tabulate import tabulate

from tfdist.addons.planner.estimates import Estimate
from tfdist.addons.planner.machines import Machine
from tfdist.addons.planner.parts import Model, check_model, count_parameters
from tfdist.addons.planner.quantities import as_count, as_seconds
from tfdist.addons.planner.search import Limits, Search
from tfdist.utils import checks
from tfdist.utils.quantities import as_bytes

_MOST_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rejection:
    """The reason why a kind of layout was not chosen.

    Attributes:
        kind: The axes of the kind, as text.
        reason: The limiting term, as text.
        estimate: The best layout of the kind; None if none is valid and fits.
    """

    kind: str
    reason: str
    estimate: Estimate | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of a search.

    Attributes:
        best: Estimates of the fastest layouts that fit, fastest first; empty if none fits.
        rejected: The other kinds of layouts, with the reasons.
        considered: Number of layouts.
        estimated: Number of layouts that bounds did not exclude.
        parameters: Parameters of the model.
    """

    best: tuple[Estimate, ...]
    rejected: tuple[Rejection, ...]
    considered: int
    estimated: int
    parameters: float

    def table(self) -> str:
        """The best layouts, and the reasons against others, as text."""
        rows = [
            (
                each.layout.words() + (" *" if each.extrapolated else ""),
                as_seconds(each.step_seconds),
                f"{each.mfu:.1%}",
                as_bytes(each.memory.total),
                f"{each.bubble:.1%}",
                each.binding,
            )
            for each in self.best
        ]
        head = (
            "layout",
            "step",
            "MFU",
            "memory per rank",
            "bubble",
            "largest cost besides compute",
        )
        lines = [tabulate(rows, head, disable_numparse=True)] if rows else ["No layout fits."]
        marks = {mark for each in self.best for mark in each.extrapolated}
        lines += [f"* extrapolated: {mark}" for mark in sorted(marks)]
        if self.rejected:
            others = [(each.kind, each.reason) for each in self.rejected]
            lines += ["", tabulate(others, ("not chosen", "reason"), disable_numparse=True)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def plan(
    model: Model,
    machine: Machine,
    *,
    global_batch: int,
    ranks: int,
    limits: Limits | None = None,
    best: int = 3,
) -> Plan:
    """Find the layouts that train a model fastest.

    Args:
        model: The model.
        machine: The machine.
        global_batch: Samples of an update, over all ranks.
        ranks: Number of ranks.
        limits: The options and limits; None for `Limits()`.
        best: Number of layouts to return.

    Raises:
        ValueError: A number is not positive, or the ranks require a link that the machine lacks.
    """
    check_model(model)
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    checks.integer("global_batch", global_batch, minimum=1)
    checks.integer("ranks", ranks, minimum=1, maximum=_MOST_RANKS)
    checks.instance("limits", limits, Limits, "tfdist.addons.planner.Limits", optional=True)
    checks.integer("best", best, minimum=1, maximum=1000)
    search = Search(model, machine, global_batch, ranks, limits or Limits(), best).run()
    winners = {each.layout.kind for each in search.best}
    fastest = search.best[0].step_seconds if search.best else None
    memory = machine.memory if limits is None or limits.memory is None else limits.memory
    rejected = []
    for kind, found in search.kinds.items():
        if found.best is not None and kind in winners:
            continue
        if found.why is not None:
            reason = f"cannot be split: {found.why}"
        elif found.best is not None and fastest is not None:
            reason = (
                f"{found.best.step_seconds / fastest:.2f} times the time: {found.best.binding} "
                f"({found.best.layout.words()})"
            )
        elif found.closest is not None:
            closest = found.closest
            reason = (
                f"too large: {as_bytes(closest.memory.total)} of {as_bytes(memory)}, "
                f"{closest.binding.removeprefix('memory, ')} ({closest.layout.words()})"
            )
        else:
            reason = (
                f"too large: at least {as_bytes(found.least)} of {as_bytes(memory)}, mostly "
                f"{found.binds}"
            )
        rejected.append(Rejection(kind, reason, found.best))
    used = " ".join(search.kinds)
    for axis, why in search.refused.items():
        if axis not in used:
            rejected.append(Rejection(axis, f"cannot be split: {why}", None))
    rejected.sort(key=lambda each: each.estimate.step_seconds if each.estimate else float("inf"))
    return Plan(
        tuple(search.best),
        tuple(rejected),
        search.considered,
        search.estimated,
        count_parameters(model),
    )


def summary(estimate: Estimate) -> str:
    """Tables of the memory, time and traffic of a layout, as text."""
    times = [(kind, as_seconds(each)) for kind, each in estimate.seconds.items() if each > 0]
    memory = estimate.memory
    kinds = ("parameters", "copies", "gradients", "optimizer", "activations", "working", "buffers",
             "allocator", "process")  # fmt: skip
    held = [(kind, as_bytes(getattr(memory, kind))) for kind in kinds if getattr(memory, kind)]
    sent = [(axis, as_bytes(each)) for axis, each in estimate.traffic.items() if each]
    tables = [
        tabulate(held, ("memory per rank", ""), disable_numparse=True, colalign=("left", "right")),
        tabulate(times, ("time per step", ""), disable_numparse=True, colalign=("left", "right")),
    ]
    if sent:
        head = ("traffic per rank and step, by axis", "")
        tables.append(tabulate(sent, head, disable_numparse=True, colalign=("left", "right")))
    return (
        f"{estimate}\n{as_count(estimate.flops)} model FLOPs per step, summed over layers; "
        f"{as_count(estimate.flops_6nd)} by 6ND of the active parameters\n\n" + "\n\n".join(tables)
    )
