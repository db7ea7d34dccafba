"""Failures: how often to save, and how much of a job's time trains the model."""

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
    """Seconds of training between two saves that lose least to saving and failures together.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37, which refines Young's sqrt(2 save mtbf) of 1974. It is what
    `tfdist.callbacks.Checkpointer(every="auto")` takes.

    Args:
        save_seconds: For how long a save holds training up.
        mtbf_seconds: The mean time between failures of the whole job.
    """
    checks.number("save_seconds", save_seconds, above=0)
    checks.number("mtbf_seconds", mtbf_seconds, above=0)
    return young_daly(save_seconds, mtbf_seconds)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """How much of a job's time trains the model.

    Attributes:
        share: Of the time that a job runs, the share of steps that are not done again.
        interval: Seconds of training between two saves.
        mtbf: Seconds between failures of the job.
        saving: The share of the time for saving.
        lost: The share for steps that are done again.
        restarting: The share for starting again.
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

    With M between failures of the job, an interval t, a save d and a restart R, failures come as a
    Poisson process, also while saving and starting again. A stretch of t + d takes
    M exp(R / M) (exp((t + d) / M) - 1) on average until it is through (Daly 2006, equation 20), of
    which t counts.

    Args:
        ranks: Ranks, any of which ends the job when it fails.
        mtbf_hours: Hours between failures of one rank.
        save_seconds: For how long a save holds training up.
        restart_seconds: From a failure to the next step: to notice, to meet again, to read.
        interval: Seconds between saves; None for those of `save_interval`.
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
    # Failures until a stretch is through, each with a restart that may itself be cut short.
    failures = math.expm1(stretch / mtbf)
    restarts = failures * mtbf * math.expm1(restart_seconds / mtbf)
    share, saving = t / whole, save_seconds / whole
    restarting = restarts / whole
    return Goodput(share, t, mtbf, saving, 1 - share - saving - restarting, restarting)


def checkpoint_bytes(estimate: Estimate) -> float:
    """Bytes of a checkpoint: parameters in float32, or as they are stored, and the optimizer's state."""
    checks.instance("estimate", estimate, Estimate, "an Estimate")
    layout = estimate.layout
    stored = layout.precision.parameter if not layout.precision.master else 0
    return estimate.parameters * (stored + layout.state_bytes)


def required_bandwidth(size: float, updates: float, ranks: int, compression: float = 1.0) -> float:
    """Bytes a second that each rank's link carries for gradients: 2 (n - 1) / n S u / c.

    The all-reduce of n ranks on S bytes (Patarasuk and Yuan 2009), u times a second, of gradients that are
    c times smaller on their way. Times 8 for bits.

    Args:
        size: Bytes of the gradients.
        updates: Updates a second.
        ranks: Ranks that add up.
        compression: By how much gradients shrink.
    """
    checks.number("size", size, above=0)
    checks.number("updates", updates, above=0)
    checks.integer("ranks", ranks, minimum=1)
    checks.number("compression", compression, minimum=1)
    return 2 * (ranks - 1) / ranks * size * updates / compression


@dataclasses.dataclass(frozen=True)
class Run:
    """What a whole training takes.

    Attributes:
        steps: Updates.
        seconds: Time, with failures.
        rank_hours: Hours of all ranks together.
        kilowatt_hours: Energy of all ranks at full load; None if the machine does not say.
        price: What the ranks cost; None if the machine does not say.
    """

    steps: int
    seconds: float
    rank_hours: float
    kilowatt_hours: float | None
    price: float | None


def run_cost(estimate: Estimate, machine: Machine, tokens: float, share: float = 1.0) -> Run:
    """What a training on so many tokens takes, from the time of a step.

    Args:
        estimate: Of a step.
        machine: The machine.
        tokens: Tokens of the training; samples for models that have none.
        share: The goodput.
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
