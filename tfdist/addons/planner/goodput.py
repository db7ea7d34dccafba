"""Failures: the checkpoint interval, and the share of a job's time that trains the model."""

from __future__ import annotations

import dataclasses
import math

from tfdist.addons.planner.estimates import Estimate
from tfdist.addons.planner.machines import Machine
from tfdist.runtime.save_interval import young_daly
from tfdist.utils import checks

__all__ = [
    "Goodput",
    "Run",
    "checkpoint_bytes",
    "goodput",
    "required_bandwidth",
    "run_cost",
    "save_interval",
]


def save_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that minimize the time lost to saving and failures.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37, which refines Young's sqrt(2 save mtbf) of 1974. Also used by
    `tfdist.callbacks.Checkpointer(every="auto")`.

    Args:
        save_seconds: Seconds for which a save blocks training.
        mtbf_seconds: Mean time between failures of the whole job, in seconds.
    """
    checks.number("save_seconds", save_seconds, above=0)
    checks.number("mtbf_seconds", mtbf_seconds, above=0)
    return young_daly(save_seconds, mtbf_seconds)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The share of a job's time that trains the model.

    Attributes:
        share: The share of the job's time for steps that are not repeated.
        interval: Seconds of training between two saves.
        mtbf: Mean time between failures of the job, in seconds.
        saving: The share for saving.
        lost: The share for steps that are repeated.
        restarting: The share for restarting.
    """

    share: float
    interval: float
    mtbf: float
    saving: float
    lost: float
    restarting: float


def goodput(
    ranks: int,
    *,
    mtbf_hours: float,
    save_seconds: float,
    restart_seconds: float,
    interval: float | None = None,
) -> Goodput:
    """The expected goodput of a job whose ranks fail independently.

    With a mean time between failures M of the job, an interval t, a save d and a restart R, failures
    are a Poisson process, also during saves and restarts. A segment of t + d takes
    M exp(R / M) (exp((t + d) / M) - 1) on average to complete (Daly 2006, equation 20), of which t
    is useful.

    Args:
        ranks: Number of ranks; the failure of any ends the job.
        mtbf_hours: Mean time between failures of one rank, in hours.
        save_seconds: Seconds for which a save blocks training.
        restart_seconds: Seconds from a failure to the next step: detection, rendezvous and restore.
        interval: Seconds of training between saves; None for `save_interval`.
    """
    checks.integer("ranks", ranks, minimum=1)
    checks.number("mtbf_hours", mtbf_hours, above=0)
    checks.number("save_seconds", save_seconds, above=0)
    checks.number("restart_seconds", restart_seconds, minimum=0)
    checks.number("interval", interval, above=0, optional=True)
    mtbf = mtbf_hours * 3600 / ranks
    t = save_interval(save_seconds, mtbf) if interval is None else interval
    stretch = t + save_seconds
    if stretch / mtbf > 700 or restart_seconds / mtbf > 700:
        return Goodput(0.0, t, mtbf, 0.0, 0.0, 1.0)
    whole = mtbf * math.exp(restart_seconds / mtbf) * math.expm1(stretch / mtbf)
    # Failures until a segment is complete, each with a restart that may fail too.
    failures = math.expm1(stretch / mtbf)
    restarts = failures * mtbf * math.expm1(restart_seconds / mtbf)
    share, saving = t / whole, save_seconds / whole
    restarting = restarts / whole
    return Goodput(share, t, mtbf, saving, 1 - share - saving - restarting, restarting)


def checkpoint_bytes(estimate: Estimate) -> float:
    """Bytes of a checkpoint: stored parameters, or their master copy, and the optimizer state."""
    checks.instance("estimate", estimate, Estimate, "an Estimate")
    layout = estimate.layout
    stored = layout.precision.parameter if not layout.precision.master else 0
    return estimate.parameters * (stored + layout.state_bytes)


def required_bandwidth(size: float, updates: float, ranks: int, compression: float = 1.0) -> float:
    """Bytes per second that each rank sends for gradients: 2 (n - 1) / n S u / c.

    An all-reduce of S bytes over n ranks (Patarasuk and Yuan 2009), u times per second, with gradients
    compressed by a factor of c.

    Args:
        size: Bytes of the gradients.
        updates: Updates per second.
        ranks: Ranks of the all-reduce.
        compression: Compression ratio of the gradients.
    """
    checks.number("size", size, above=0)
    checks.number("updates", updates, above=0)
    checks.integer("ranks", ranks, minimum=1)
    checks.number("compression", compression, minimum=1)
    return 2 * (ranks - 1) / ranks * size * updates / compression


@dataclasses.dataclass(frozen=True)
class Run:
    """The cost of a whole training run.

    Attributes:
        steps: Number of updates.
        seconds: Duration, including failures.
        rank_hours: Hours summed over ranks.
        kilowatt_hours: Energy of all ranks at full load; None if the machine has no `watts`.
        price: Price of the rank hours; None if the machine has no `price`.
    """

    steps: int
    seconds: float
    rank_hours: float
    kilowatt_hours: float | None
    price: float | None


def run_cost(estimate: Estimate, machine: Machine, tokens: float, share: float = 1.0) -> Run:
    """Compute the cost of a training run from the time of a step.

    Args:
        estimate: The estimate of a step.
        machine: The machine.
        tokens: Tokens to train on; samples for models without tokens.
        share: The goodput, from 0 to 1.
    """
    checks.instance("estimate", estimate, Estimate, "an Estimate")
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    checks.number("tokens", tokens, above=0)
    checks.number("share", share, above=0, maximum=1)
    steps = math.ceil(tokens / estimate.tokens)
    seconds = steps * estimate.step_seconds / share
    hours = seconds / 3600 * estimate.layout.ranks
    watts, price = machine.watts, machine.price
    return Run(
        steps,
        seconds,
        hours,
        None if watts is None else hours * watts / 1000,
        None if price is None else hours * price,
    )
