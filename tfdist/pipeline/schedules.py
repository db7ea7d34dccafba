"""Schedules: in which order each rank of a pipeline works on its micro-batches.

A schedule is data. It says what a rank computes and when relative to its other work; what must be
sent follows from it. `tfdist.pipeline.simulation` checks one without a device,
`tfdist.pipeline.executor` runs it.

The model is a chain of stages; stage s lies on rank s % num_ranks. With several stages a rank
(chunks), the chain passes each rank several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from tfdist.utils import checks

#: The largest schedule that is written down: a thousand ranks with as many micro-batches.
MOST_FORWARDS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One piece of a rank's work.

    Attributes:
        kind: What is computed of the stage for the micro-batch: `Action.FORWARD`, its outputs;
            `Action.BACKWARD`, the gradient of its inputs, and where the schedule does not split it, of its
            weights too; `Action.WEIGHT`, the gradient of its weights.
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
        name: What the schedule is called.
        num_ranks: The size of the pipeline axis.
        num_microbatches: Into how many micro-batches a batch is cut.
        chunks: How many stages lie on each rank.
        splits_backward: Whether gradients of weights are actions of their own.
        actions: For each rank what it does, in order.
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
        """The place on the pipeline axis that works on a stage."""
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
    return Schedule(
        "gpipe",
        num_ranks,
        num_microbatches,
        1,
        False,
        tuple(
            tuple(Action(Action.FORWARD, rank, m) for m in microbatches)
            + tuple(Action(Action.BACKWARD, rank, m) for m in reversed(microbatches))
            for rank in range(num_ranks)
        ),
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """A few forwards to fill the pipeline, then forward and backward by turns.

    Rank r holds the activations of at most num_ranks - r micro-batches, however many there are.
    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-flush).
    """
    actions = []
    for rank in range(num_ranks):
        forwards = [Action(Action.FORWARD, rank, m) for m in range(num_microbatches)]
        backwards = [Action(Action.BACKWARD, rank, m) for m in range(num_microbatches)]
        warmup = min(num_ranks - rank - 1, num_microbatches)
        actions.append(_alternate(forwards, backwards, warmup))
    return Schedule("1f1b", num_ranks, num_microbatches, 1, False, tuple(actions))


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B where each rank has several stages, far apart in the chain.

    The pipeline fills in `chunks` times shorter time, for as many times more messages. Narayanan
    et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".

    Raises:
        ValueError: The micro-batches do not divide by the ranks.
    """
    check_arguments("interleaved", num_ranks, num_microbatches, chunks)
    total = num_microbatches * chunks
    actions = []
    for rank in range(num_ranks):

        def work(kind: str, number: int, rank=rank) -> Action:
            # A group of num_ranks micro-batches passes all chunks before the next group begins.
            group, place = divmod(number, num_ranks * chunks)
            chunk, microbatch = divmod(place, num_ranks)
            if kind == Action.BACKWARD:
                chunk = chunks - 1 - chunk
            return Action(kind, chunk * num_ranks + rank, group * num_ranks + microbatch)

        forwards = [work(Action.FORWARD, number) for number in range(total)]
        backwards = [work(Action.BACKWARD, number) for number in range(total)]
        warmup = min(2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks, total)
        actions.append(_alternate(forwards, backwards, warmup))
    return Schedule("interleaved", num_ranks, num_microbatches, chunks, False, tuple(actions))


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with the gradients of weights put off, to where a rank would have to wait.

    No rank holds more micro-batches than the first rank of 1F1B does. Qi et al. 2023, "Zero
    Bubble Pipeline Parallelism" (ZB-H1).

    Rank r begins the gradients of weights r micro-batches late, so that each rank holds just
    num_ranks, and does what is left when it would have to wait for others to finish.
    """
    actions = []
    for rank in range(num_ranks):
        counts = dict.fromkeys(Action.KINDS, 0)
        work: list[Action] = []

        def do(kind: str, rank=rank, counts=counts, work=work) -> None:
            work.append(Action(kind, rank, counts[kind]))
            counts[kind] += 1

        for _ in range(min(num_ranks - rank, num_microbatches)):
            do(Action.FORWARD)
        while counts[Action.BACKWARD] < num_microbatches:
            do(Action.BACKWARD)
            if counts[Action.BACKWARD] - counts[Action.WEIGHT] > rank:
                do(Action.WEIGHT)
            if counts[Action.FORWARD] < num_microbatches:
                do(Action.FORWARD)
        while counts[Action.WEIGHT] < num_microbatches:
            do(Action.WEIGHT)
        actions.append(tuple(work))
    return Schedule("zero-bubble", num_ranks, num_microbatches, 1, True, tuple(actions))


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward by turns, then the backwards that are left."""
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
    """Checks the arguments of `make_schedule`, in no time.

    Args:
        name: As there.
        num_ranks: As there.
        num_microbatches: As there.
        chunks: As there.
        most: How many forward passes there may be: a schedule is written down action by action,
            which would take minutes and gigabytes for numbers that are a slip of the hand.

    Raises:
        ValueError: As there.
    """
    checks.one_of("name", name, sorted(SCHEDULES))
    num_ranks = checks.integer("num_ranks", num_ranks, minimum=1)
    num_microbatches = checks.integer("num_microbatches", num_microbatches, minimum=1)
    chunks = checks.integer("chunks", chunks, minimum=1, optional=True)
    if chunks not in (None, 1) and name != "interleaved":
        raise ValueError(
            f"Only the interleaved schedule has several `chunks` a rank. Received: {name!r} with "
            f"chunks={chunks}."
        )
    forwards = num_ranks * num_microbatches * (chunks or (2 if name == "interleaved" else 1))
    if forwards > most:
        raise ValueError(
            f"A schedule has at most {most:,} forward passes: `num_ranks` times `num_microbatches` "
            f"times `chunks`. Received: num_ranks={num_ranks}, num_microbatches={num_microbatches}, "
            f"chunks={chunks}."
        )
    if name == "interleaved" and num_microbatches % num_ranks:
        raise ValueError(
            "The interleaved schedule takes micro-batches in groups of the size of the pipeline "
            "axis: the number of micro-batches divides by it. Received: "
            f"{num_microbatches} micro-batches, pipeline={num_ranks}."
        )


def chosen_schedule(
    schedule: str | Schedule | Callable[[int, int], Schedule],
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None = None,
) -> Schedule:
    """A schedule of tfdist's by its name, or one of the user's; it is not checked yet.

    Args:
        schedule: A name, a schedule, or a function that makes one of the next two arguments.
        num_ranks: The size of the pipeline axis.
        num_microbatches: Into how many micro-batches a batch is cut.
        chunks: As in `make_schedule`; a schedule has its own.

    Raises:
        TypeError: It is none of the three.
        ValueError: It is for other numbers.
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
            f"`chunks` must be that of the schedule, {found.chunks}. Received: chunks={chunks}. Leave it out."
        )
    if (found.num_ranks, found.num_microbatches) != (num_ranks, num_microbatches):
        raise ValueError(
            f"Schedule {found.name!r} must be made for {num_ranks} ranks of the pipeline axis and "
            f"{num_microbatches} micro-batches. Received: one of {found.num_ranks} ranks and "
            f"{found.num_microbatches} micro-batches. Pass a function that makes it of these numbers."
        )
    return found


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Returns a schedule by name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: The size of the pipeline axis.
        num_microbatches: Into how many micro-batches a batch is cut.
        chunks: How many stages lie on each rank, for "interleaved" (2 by default).

    Raises:
        ValueError: The name is unknown, a number is not positive, or the schedule cannot have it.
    """
    check_arguments(name, num_ranks, num_microbatches, chunks)
    if name == "interleaved":
        return interleaved_1f1b(num_ranks, num_microbatches, chunks or 2)
    return SCHEDULES[name](num_ranks, num_microbatches)
