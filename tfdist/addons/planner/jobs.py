"""A whole job as events: steps, saves, failures and restarts, and what becomes the bottleneck."""

from __future__ import annotations

import dataclasses
import random

from tfdist.addons.planner.goodput import save_interval
from tfdist.utils import checks

_MOST_EVENTS = 5_000_000


@dataclasses.dataclass(frozen=True)
class JobTimes:
    """What a job does beside training, by the number of its ranks.

    Attributes:
        checkpoint: Bytes of a checkpoint.
        storage: Bytes a second that all ranks together write or read.
        write: Bytes a second that a rank writes or reads at most.
        start: Seconds until a process is there: interpreter, imports, first step.
        roll_call: Seconds that the meeting of all ranks takes for each of them, where one listens to
            all; what a tree takes is this times the logarithm.
        notice: Seconds until a death is noticed.
        as_tree: Whether ranks meet over a tree.
    """

    checkpoint: float
    storage: float
    write: float
    start: float = 30.0
    roll_call: float = 1e-3
    notice: float = 5.0
    as_tree: bool = False

    def __post_init__(self):
        for name in ("checkpoint", "storage", "write"):
            checks.number(name, getattr(self, name), above=0)
        for name in ("start", "roll_call", "notice"):
            checks.number(name, getattr(self, name), minimum=0)

    def save(self, ranks: int) -> float:
        """Seconds of a save: as fast as the storage and as all ranks together."""
        return self.checkpoint / min(self.storage, self.write * ranks)

    def meet(self, ranks: int) -> float:
        """Seconds until all ranks have met."""
        return self.roll_call * (max(ranks.bit_length(), 1) if self.as_tree else ranks)

    def restart(self, ranks: int) -> float:
        """Seconds from a failure to the next step."""
        return self.notice + self.start + self.meet(ranks) + self.save(ranks)


@dataclasses.dataclass(frozen=True)
class SimulatedJob:
    """A job that was played through.

    Attributes:
        goodput: The share of its time for steps that are not done again.
        failures: How many there were.
        seconds: How long it ran.
        saving: The share of time for saves.
        lost: The share for steps that are done again.
        restarting: The share from failures to the next step.
    """

    goodput: float
    failures: int
    seconds: float
    saving: float
    lost: float
    restarting: float


def simulate_job(
    ranks: int,
    times: JobTimes,
    *,
    mtbf_hours: float,
    training_hours: float,
    interval: float | None = None,
    seed: int = 0,
) -> SimulatedJob:
    """Plays a job whose ranks fail independently, each `mtbf_hours` on average.

    Args:
        ranks: Its ranks, any of which ends it.
        times: What it does beside training.
        mtbf_hours: Hours between failures of a rank.
        training_hours: Hours of steps that the training takes without failures.
        interval: Seconds of training between saves; None for the best.
        seed: Of the draws.

    Raises:
        ValueError: A number is not positive, or the job would not get on.
    """
    checks.integer("ranks", ranks, minimum=1, maximum=1 << 20)
    checks.instance("times", times, JobTimes, "JobTimes")
    checks.number("mtbf_hours", mtbf_hours, above=0)
    checks.number("training_hours", training_hours, above=0)
    checks.number("interval", interval, above=0, optional=True)
    checks.integer("seed", seed, minimum=0)
    draw = random.Random(seed)
    rate = ranks / (mtbf_hours * 3600)
    save, restart = times.save(ranks), times.restart(ranks)
    stretch = save_interval(save, 1 / rate) if interval is None else interval
    wanted = training_hours * 3600
    if wanted / stretch > _MOST_EVENTS or (stretch + save) * rate > 12:
        raise ValueError(
            f"A job saves at most {_MOST_EVENTS:,} times, and fails seldom enough to get from a save to "
            f"the next. Received: interval={stretch:.3g} s, save={save:.3g} s, a failure every "
            f"{1 / rate:.3g} s."
        )
    clock = kept = lost = saving = restarting = 0.0
    failures = 0
    until = draw.expovariate(rate)
    while kept < wanted:
        work = min(stretch, wanted - kept)
        if until >= work + save:
            clock, until = clock + work + save, until - work - save
            kept, saving = kept + work, saving + save
            continue
        clock, lost = clock + until, lost + until
        failures += 1
        # A rank may fail while the job starts again, which then begins anew.
        while (until := draw.expovariate(rate)) < restart:
            clock, restarting, failures = clock + until, restarting + until, failures + 1
            if failures > _MOST_EVENTS:
                raise ValueError(
                    "The job fails again before it has started. Received: "
                    f"restart={restart:.3g} s, a failure every {1 / rate:.3g} s."
                )
        clock, restarting, until = clock + restart, restarting + restart, until - restart
    return SimulatedJob(
        kept / clock, failures, clock, saving / clock, lost / clock, restarting / clock
    )


def bottleneck(
    times: JobTimes, *, mtbf_hours: float, share: float = 0.05, most: int = 1 << 17
) -> dict[str, int | None]:
    """From how many ranks on something takes more than a share of a job's time.

    For "checkpoint" it is what saves hold up at the best interval; for "roll call" and "start" what they
    take of the time between two failures.

    Args:
        times: What the job does beside training.
        mtbf_hours: Hours between failures of a rank.
        share: The share.
        most: The largest number of ranks that is tried.

    Returns:
        By what it is, the number of ranks, by powers of two; None where it stays below.
    """
    checks.instance("times", times, JobTimes, "JobTimes")
    checks.number("mtbf_hours", mtbf_hours, above=0)
    checks.number("share", share, above=0, below=1)
    checks.integer("most", most, minimum=1, maximum=1 << 24)
    found: dict[str, int | None] = dict.fromkeys(("checkpoint", "roll call", "start"))
    ranks = 1
    while ranks <= most:
        mtbf = mtbf_hours * 3600 / ranks
        save = times.save(ranks)
        taken = {
            "checkpoint": save / (save + save_interval(save, mtbf)),
            "roll call": times.meet(ranks) / mtbf,
            "start": times.start / mtbf,
        }
        for name, part in taken.items():
            if found[name] is None and part > share:
                found[name] = ranks
        ranks *= 2
    return found
