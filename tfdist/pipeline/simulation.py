"""Simulation of schedules without a device: whether they can run, and how long ranks are idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.pipeline.schedules import Action, Schedule
from tfdist.utils import checks

#: Equal times for a forward and each half of a backward, as in the papers.
UNIT_COSTS: Mapping[str, float] = dict.fromkeys(Action.KINDS, 1.0)


@dataclasses.dataclass(frozen=True)
class Run:
    """The times of a schedule, simulated or measured.

    Attributes:
        schedule: The schedule.
        times: Begin and end of each action, in order, for each rank.
    """

    schedule: Schedule
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def span(self) -> float:
        """The time from the first begin to the last end."""
        return max(end for rank in self.times for _, end in rank)

    @property
    def idle_share(self) -> float:
        """Mean idle time of ranks over the time of the step: the bubble as a share of the step."""
        busy = sum(end - begin for rank in self.times for begin, end in rank)
        return 1 - busy / (len(self.times) * self.span)


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """The actions on any rank that must end before an action."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == Action.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage else []
    if kind == Action.WEIGHT:
        return [Action(Action.BACKWARD, stage, microbatch)]
    found = [Action(Action.FORWARD, stage, microbatch)]
    if stage < schedule.num_stages - 1:
        found.append(Action(kind, stage + 1, microbatch))
    return found


def simulate(
    schedule: Schedule, costs: Mapping[str, float] = UNIT_COSTS, transfer: float = 0.0
) -> Run:
    """Simulates a schedule.

    Args:
        schedule: The schedule.
        costs: The time of an action on all stages of a rank, by kind; an action on one stage takes 1 /
            `chunks` of it. If the schedule does not split the backward, the time of a
            backward is that of both halves.
        transfer: The time of a message, during which ranks can compute.

    Raises:
        ValueError: The schedule deadlocks; the message lists the action that each rank waits for.
    """
    done: dict[Action, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            for action in actions[len(times[rank]) :]:
                needed = needs(action, schedule)
                if any(other not in done for other in needed):
                    break
                ends = [done[o] + transfer * (schedule.rank_of(o.stage) != rank) for o in needed]
                begin = max([free[rank], *ends])
                done[action] = free[rank] = begin + _cost(action, schedule, costs)
                times[rank].append((begin, free[rank]))
                progress = True
    stuck = []
    for rank, (actions, found) in enumerate(zip(schedule.actions, times, strict=True)):
        for action in actions[len(found) : len(found) + 1]:
            missing = [str(other) for other in needs(action, schedule) if other not in done]
            stuck.append(f"rank {rank} at {action}, which requires {', '.join(missing)}")
    if stuck:
        raise ValueError(
            f"Schedule {schedule.name!r} cannot run, it deadlocks: {'; '.join(stuck)}."
        )
    return Run(schedule, tuple(map(tuple, times)))


def check_schedule(schedule: Schedule) -> Run:
    """Simulates a schedule, and raises ValueError unless it can run.

    Each rank must do each of its actions once, all of them after the actions that they require (a forward
    before its backward, and that before its gradient of weights), without a deadlock.
    """
    checks.instance("schedule", schedule, Schedule, "a Schedule")
    if len(schedule.actions) != schedule.num_ranks:
        raise ValueError(
            f"Schedule {schedule.name!r} must have a sequence of actions for each of its "
            f"{schedule.num_ranks} ranks. Received: {len(schedule.actions)}."
        )
    kinds = [Action.FORWARD, Action.BACKWARD] + [Action.WEIGHT] * schedule.splits_backward
    for rank, actions in enumerate(schedule.actions):
        expected = {
            Action(kind, stage, microbatch)
            for kind in kinds
            for stage in schedule.stages_of(rank)
            for microbatch in range(schedule.num_microbatches)
        }
        wrong = expected.symmetric_difference(actions)
        if wrong or len(actions) != len(expected):
            raise ValueError(
                f"Rank {rank} of schedule {schedule.name!r} must do each of its actions once. "
                f"Missing or unexpected: {sorted(map(str, wrong)) or 'none, but some are repeated'}."
            )
    return simulate(schedule)


def _cost(action: Action, schedule: Schedule, costs: Mapping[str, float]) -> float:
    cost = costs[action.kind]
    if action.kind == Action.BACKWARD and not schedule.splits_backward:
        cost += costs[Action.WEIGHT]
    return cost / schedule.chunks
