"""Schedules: the order in which each rank of a pipeline works on its micro-batches.

A schedule is data: the computations of each rank and their order, which determine what must be sent.
`tfdist.pipeline.simulation` checks a schedule without a device, and `tfdist.pipeline.executor` runs it.

The model is a chain of stages; stage s is on rank s % num_ranks. With several stages on each rank
(chunks), the chain passes each rank several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from tfdist.utils import checks

#: The size limit of a schedule: a thousand ranks with the same number of micro-batches.
MOST_FORWARDS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One computation of a rank.

    Attributes:
        kind: What is computed for the micro-batch: `Action.FORWARD`, the outputs of the stage;
            `Action.BACKWARD`, the gradient of its inputs, and of its weights too unless the schedule
            splits the two; `Action.WEIGHT`, the gradient of its weights.
        stage: The stage.
        microbatch: The micro-batch.
    """

    FORWARD: ClassVar = "F"
    BACKWARD: ClassVar = "B"
    WEIGHT: ClassVar = "W"
    KINDS: ClassVar = (FORWARD, BACKWARD, WEIGHT)

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of all ranks for one training step.

    Attributes:
        name: The name.
        num_ranks: The size of the pipeline axis.
        num_microbatches: The number of micro-batches of a batch.
        chunks: The number of stages on each rank.
        splits_backward: Whether gradients of weights are separate actions.
        actions: The actions of each rank, in order.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    chunks: int
    splits_backward: bool
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages in the chain."""
        return self.num_ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The index on the pipeline axis of the rank of a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(range(rank, self.num_stages, self.num_ranks))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first.

    Each rank holds the activations of all micro-batches. Huang et al. 2019, "GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism".
    """
    microbatches = range(num_microbatches)
    actions = [
        _alternate(
            _actions(Action.FORWARD, rank, microbatches),
            _actions(Action.BACKWARD, rank, reversed(microbatches)),
            num_microbatches,
        )
        for rank in range(num_ranks)
    ]
    return Schedule("gpipe", num_ranks, num_microbatches, 1, False, tuple(actions))


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Forwards until the pipeline is full, then forward and backward in turns.

    Rank r holds the activations of at most num_ranks - r micro-batches, independent of their number.
    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-flush).
    """
    microbatches = range(num_microbatches)
    actions = [
        _alternate(
            _actions(Action.FORWARD, rank, microbatches),
            _actions(Action.BACKWARD, rank, microbatches),
            num_ranks - rank - 1,
        )
        for rank in range(num_ranks)
    ]
    return Schedule("1f1b", num_ranks, num_microbatches, 1, False, tuple(actions))


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages on each rank, at a distance of num_ranks in the chain.

    The pipeline fills in 1 / `chunks` of the time, with `chunks` times the number of messages. Narayanan
    et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".

    Raises:
        ValueError: The number of micro-batches is not a multiple of that of ranks.
    """
    check_arguments("interleaved", num_ranks, num_microbatches, chunks)

    def work(kind: str, rank: int) -> list[Action]:
        # Micro-batches in groups of num_ranks, each of which passes all chunks before the next group.
        order = range(chunks) if kind == Action.FORWARD else reversed(range(chunks))
        stages = [chunk * num_ranks + rank for chunk in order]
        return [
            Action(kind, stage, group + place)
            for group in range(0, num_microbatches, num_ranks)
            for stage in stages
            for place in range(num_ranks)
        ]

    actions = [
        _alternate(
            work(Action.FORWARD, rank),
            work(Action.BACKWARD, rank),
            2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks,
        )
        for rank in range(num_ranks)
    ]
    return Schedule("interleaved", num_ranks, num_microbatches, chunks, False, tuple(actions))


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with the gradients of weights delayed to times when a rank would otherwise wait.

    No rank holds more micro-batches than the first rank of 1F1B. Rank r computes the gradients of weights
    with a delay of r micro-batches, so that each rank holds exactly num_ranks; it computes the remaining
    ones when it would have to wait for other ranks to finish. Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism" (ZB-H1).
    """
    actions = []
    for rank in range(num_ranks):
        microbatches = range(num_microbatches)
        forwards, backwards, weights = (_actions(kind, rank, microbatches) for kind in Action.KINDS)
        warmup = min(num_ranks - rank, num_microbatches)
        work = forwards[:warmup]
        for done in microbatches:
            work.append(backwards[done])
            if done >= rank:
                work.append(weights[done - rank])
            work += forwards[warmup + done : warmup + done + 1]
        actions.append((*work, *weights[max(0, num_microbatches - rank) :]))
    return Schedule("zero-bubble", num_ranks, num_microbatches, 1, True, tuple(actions))


def _actions(kind: str, stage: int, microbatches: Iterable[int]) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in microbatches]


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turns, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    actions = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - warmup :])


#: Schedules by the names that flags and arguments use.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved_1f1b,
    "zero-bubble": zero_bubble,
}


def check_arguments(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None = None,
    *,
    most: int = MOST_FORWARDS,
) -> None:
    """Checks the arguments of `make_schedule` without making the schedule.

    Args:
        name: As in `make_schedule`.
        num_ranks: As in `make_schedule`.
        num_microbatches: As in `make_schedule`.
        chunks: As in `make_schedule`.
        most: The maximum number of forward passes. A schedule lists every action, which would take minutes
            and gigabytes for numbers given by mistake.

    Raises:
        ValueError: As in `make_schedule`.
    """
    checks.one_of("name", name, sorted(SCHEDULES))
    num_ranks = checks.integer("num_ranks", num_ranks, minimum=1)
    num_microbatches = checks.integer("num_microbatches", num_microbatches, minimum=1)
    chunks = checks.integer("chunks", chunks, minimum=1, optional=True)
    is_interleaved = name == "interleaved"
    if chunks not in (None, 1) and not is_interleaved:
        raise ValueError(
            "Several `chunks` per rank require the interleaved schedule. Received: "
            f"{name!r} with chunks={chunks}."
        )
    if num_ranks * num_microbatches * (chunks or (2 if is_interleaved else 1)) > most:
        raise ValueError(
            f"A schedule cannot have more than {most:,} forward passes: `num_ranks` times "
            f"`num_microbatches` times `chunks`. Received: num_ranks={num_ranks}, "
            f"num_microbatches={num_microbatches}, chunks={chunks}."
        )
    if is_interleaved and num_microbatches % num_ranks:
        raise ValueError(
            "The interleaved schedule requires num_microbatches to be a multiple of the pipeline "
            f"size. Received: {num_microbatches} micro-batches, pipeline={num_ranks}."
        )


def chosen_schedule(
    schedule: str | Schedule | Callable[[int, int], Schedule],
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None = None,
) -> Schedule:
    """One of tfdist's schedules by name, or one of the user's, which is not checked yet.

    Args:
        schedule: A name, a schedule, or a function of the next two arguments that returns one.
        num_ranks: The size of the pipeline axis.
        num_microbatches: The number of micro-batches of a batch.
        chunks: As in `make_schedule`; None for the number of the user's schedule.

    Raises:
        TypeError: The schedule is none of the three.
        ValueError: The schedule is for other numbers.
    """
    if isinstance(schedule, str):
        checks.one_of("schedule", schedule, sorted(SCHEDULES))
        return make_schedule(schedule, num_ranks, num_microbatches, chunks)
    found = schedule(num_ranks, num_microbatches) if callable(schedule) else schedule
    if not isinstance(found, Schedule):
        meaning = (
            f"one of {', '.join(sorted(SCHEDULES))}, a Schedule, or a function that returns one"
        )
        raise checks.refuse("schedule", found, meaning, TypeError)
    if chunks not in (None, found.chunks):
        raise ValueError(
            f"`chunks` must be that of the schedule, {found.chunks}. Received: chunks={chunks}. "
            "Omit it."
        )
    if (found.num_ranks, found.num_microbatches) != (num_ranks, num_microbatches):
        raise ValueError(
            f"Schedule {found.name!r} must be made for {num_ranks} ranks of the pipeline axis and "
            f"{num_microbatches} micro-batches. Received: one for {found.num_ranks} ranks and "
            f"{found.num_microbatches} micro-batches. Pass a function of these numbers that returns it."
        )
    return found


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Returns a schedule by name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: The size of the pipeline axis.
        num_microbatches: The number of micro-batches of a batch.
        chunks: The number of stages on each rank, for "interleaved" (2 by default).

    Raises:
        ValueError: The name is unknown, a number is not positive, or the schedule does not support it.
    """
    check_arguments(name, num_ranks, num_microbatches, chunks)
    options = [chunks or 2] if name == "interleaved" else []
    return SCHEDULES[name](num_ranks, num_microbatches, *options)
