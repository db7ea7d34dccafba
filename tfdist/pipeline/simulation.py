"""Schedules played through without a device: are they sound, and how long are ranks idle?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.pipeline.schedules import Action, Schedule
from tfdist.utils import checks

#: Equal times, as the papers reckon: what a forward takes, and each half of a backward.
UNIT_COSTS: Mapping[str, float] = {
    Action.FORWARD: 1.0,
    Action.BACKWARD: 1.0,
    Action.WEIGHT: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Message:
    """A tensor that one action sends to another, on another rank.

    Attributes:
        after: What makes it: outputs of a stage, or the gradient of its inputs.
        before: What needs it.
    """

    after: Action
    before: Action


@dataclasses.dataclass(frozen=True)
class Run:
    """A schedule played through.

    Attributes:
        schedule: The schedule.
        times: For each rank begin and end of each of its actions, in order.
    """

    schedule: Schedule
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def span(self) -> float:
        """From the first begin to the last end."""
        return max(end for rank in self.times for _, end in rank)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(end - begin for begin, end in rank) for rank in self.times)

    @property
    def idle_share(self) -> float:
        """Idle time over all time, of the mean rank: the bubble as a share of the step."""
        return 1 - sum(self.busy) / (len(self.busy) * self.span)

    @property
    def idle_over_ideal(self) -> float:
        """Idle time over computing time, of the mean rank: the papers' bubble ratio."""
        ideal = sum(self.busy) / len(self.busy)
        return (self.span - ideal) / ideal


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must be done before an action, on whatever rank."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == Action.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage else []
    if kind == Action.WEIGHT:
        return [Action(Action.BACKWARD, stage, microbatch)]
    found = [Action(Action.FORWARD, stage, microbatch)]
    if stage < schedule.num_stages - 1:
        found.append(Action(kind, stage + 1, microbatch))
    return found


def messages(schedule: Schedule) -> list[Message]:
    """All that is sent from rank to rank, in the order in which the receivers need it."""
    return [
        Message(needed, action)
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        for needed in needs(action, schedule)
        if schedule.rank_of(needed.stage) != rank
    ]


def simulate(
    schedule: Schedule,
    costs: Mapping[str, float] = UNIT_COSTS,
    transfer: float = 0.0,
) -> Run:
    """Plays a schedule through.

    Args:
        schedule: The schedule.
        costs: The time of an action on a whole rank's share of layers, by kind: a stage is one of
            `chunks` parts of that. Where the schedule does not split the backward, a backward
            takes the time of both halves.
        transfer: The time of a message; nobody is busy with it.

    Raises:
        ValueError: It comes to a halt; the message says where each rank waits and for what.
    """
    done: dict[Action, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while len(times[rank]) < len(actions):
                action = actions[len(times[rank])]
                needed = needs(action, schedule)
                if any(other not in done for other in needed):
                    break
                arrivals = [
                    done[other] + (transfer if schedule.rank_of(other.stage) != rank else 0.0)
                    for other in needed
                ]
                begin = max([free[rank], *arrivals])
                end = begin + _cost(action, schedule, costs)
                times[rank].append((begin, end))
                done[action] = free[rank] = end
                progress = True
    stuck = [
        f"rank {rank} at {actions[len(found)]}, which needs "
        + ", ".join(
            str(other) for other in needs(actions[len(found)], schedule) if other not in done
        )
        for rank, (actions, found) in enumerate(zip(schedule.actions, times, strict=True))
        if len(found) < len(actions)
    ]
    if stuck:
        raise ValueError(f"The schedule {schedule.name!r} comes to a halt: {'; '.join(stuck)}.")
    return Run(schedule, tuple(map(tuple, times)))


def check_schedule(schedule: Schedule) -> Run:
    """Raises ValueError unless the schedule can be run, and returns it played through.

    Each rank does each of its actions once, all come after what they need (a forward before its
    backward, that before its gradient of weights), none waits in a circle, and what leaves a rank
    is needed just once.
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
                f"Rank {rank} of the schedule {schedule.name!r} must do each of its actions once. "
                f"Missing or foreign: {sorted(map(str, wrong)) or 'none, but some are repeated'}."
            )
    sent = [message.after for message in messages(schedule)]
    if len(sent) != len(set(sent)):
        raise ValueError(f"The schedule {schedule.name!r} sends something to two ranks.")
    return simulate(schedule)


def held_microbatches(schedule: Schedule, rank: int) -> int:
    """The most activations of a stage that a rank holds at a time: forwards not yet given back."""
    last = Action.WEIGHT if schedule.splits_backward else Action.BACKWARD
    held = most = 0
    for action in schedule.actions[rank]:
        held += (action.kind == Action.FORWARD) - (action.kind == last)
        most = max(most, held)
    return most


def _cost(action: Action, schedule: Schedule, costs: Mapping[str, float]) -> float:
    cost = costs[action.kind]
    if action.kind == Action.BACKWARD and not schedule.splits_backward:
        cost += costs[Action.WEIGHT]
    return cost / schedule.chunks
