"""Discrete-event simulation of a job: steps, saves, failures and restarts, and its bottlenecks."""

from __future__ import annotations

import dataclasses
import random

from tfdist.addons.planner.goodput import save_interval
from tfdist.utils import checks

_MOST_EVENTS = 5_000_000


@dataclasses.dataclass(frozen=True)
class JobTimes:
    """Times of a job other than training, by the number of ranks.

    Attributes:
        checkpoint: Bytes of a checkpoint.
        storage: Bytes per second that all ranks together can write or read.
        write: Bytes per second that one rank can write or read.
        start: Seconds to start a process: interpreter, imports, first step.
        rendezvous: Seconds of the rendezvous per rank, if one rank connects to all others; over a
            tree, per level.
        notice: Seconds until a failure is detected.
        as_tree: Whether ranks rendezvous over a tree.
    """

    checkpoint: float
    storage: float
    write: float
    start: float = 30.0
    rendezvous: float = 1e-3
    notice: float = 5.0
    as_tree: bool = False

    def __post_init__(self):
        for name in ("checkpoint", "storage", "write"):
            checks.number(name, getattr(self, name), above=0)
        for name in ("start", "rendezvous", "notice"):
            checks.number(name, getattr(self, name), minimum=0)

    def save(self, ranks: int) -> float:
        """Seconds of a save, limited by the storage or by the ranks."""
        return self.checkpoint / min(self.storage, self.write * ranks)

    def meet(self, ranks: int) -> float:
        """Seconds of the rendezvous of all ranks."""
        return self.rendezvous * (max(ranks.bit_length(), 1) if self.as_tree else ranks)

    def restart(self, ranks: int) -> float:
        """Seconds from a failure to the next step."""
        return self.notice + self.start + self.meet(ranks) + self.save(ranks)


@dataclasses.dataclass(frozen=True)
class SimulatedJob:
    """The result of a simulated job.

    Attributes:
        goodput: The share of time for steps that are not repeated.
        failures: Number of failures.
        seconds: Duration of the job.
        saving: The share of time for saves.
        lost: The share for steps that are repeated.
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
    """Simulate a job whose ranks fail independently, each every `mtbf_hours` on average.

    Args:
        ranks: Number of ranks; the failure of any ends the job.
        times: Times other than training.
        mtbf_hours: Mean time between failures of a rank, in hours.
        training_hours: Hours of training without failures.
        interval: Seconds of training between saves; None for the best.
        seed: Seed of the random failures.

    Raises:
        ValueError: A number is not positive, or the job would hardly make progress.
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
            f"A simulated job must save at most {_MOST_EVENTS:,} times, and the time between failures must "
            f"be long enough to reach the next save. Received: interval={stretch:.3g} s, save={save:.3g} s, a failure every "
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
        # A failure during a restart starts the restart over.
        while (until := draw.expovariate(rate)) < restart:
            clock, restarting, failures = clock + until, restarting + until, failures + 1
            if failures > _MOST_EVENTS:
                raise ValueError(
                    "The job cannot restart: it fails again during each restart. Received: "
                    f"restart={restart:.3g} s, a failure every {1 / rate:.3g} s."
                )
        clock, restarting, until = clock + restart, restarting + restart, until - restart
    return SimulatedJob(
        kept / clock, failures, clock, saving / clock, lost / clock, restarting / clock
    )


def bottleneck(
    times: JobTimes, *, mtbf_hours: float, share: float = 0.05, most: int = 1 << 17
) -> dict[str, int | None]:
    """Find the number of ranks at which each overhead exceeds a share of a job's time.

    For "checkpoint" this is the time of saves at the best interval; for "rendezvous" and "start" their
    share of the time between two failures.

    Args:
        times: Times other than training.
        mtbf_hours: Mean time between failures of a rank, in hours.
        share: The share to exceed.
        most: The largest number of ranks to try.

    Returns:
        By kind of overhead, the smallest power of two ranks; None if the overhead stays below.
    """
    checks.instance("times", times, JobTimes, "JobTimes")
    checks.number("mtbf_hours", mtbf_hours, above=0)
    checks.number("share", share, above=0, below=1)
    checks.integer("most", most, minimum=1, maximum=1 << 24)
    found: dict[str, int | None] = dict.fromkeys(("checkpoint", "rendezvous", "start"))
    ranks = 1
    while ranks <= most:
        mtbf = mtbf_hours * 3600 / ranks
        save = times.save(ranks)
        taken = {
            "checkpoint": save / (save + save_interval(save, mtbf)),
            "rendezvous": times.meet(ranks) / mtbf,
            "start": times.start / mtbf,
        }
        for name, part in taken.items():
            if found[name] is None and part > share:
                found[name] = ranks
        ranks *= 2
    return found
