"""Two jobs that train the same model in turns: one works while the other waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.comparisons import Job
from benchmarks.jobs import Block, JobError, RunningJob

_WARM_UP = 3
#: Where a turn is given no number of steps: about how long it is, in seconds.
_TURN = 2.0
_LEAST_STEPS = 8


def take_turns(
    sides: Sequence[Job],
    model: str,
    sizes: Mapping[str, int],
    peers: Path,
    *,
    rounds: int,
    steps: int | None,
    timeout: float,
) -> tuple[list[RunningJob], list[list[Block]]]:
    """Runs two jobs at once, whose turns alternate; which comes first changes from round to round.

    Args:
        sides: The jobs.
        model: Which model.
        sizes: Of the model.
        peers: The folder of the environments that `make peers` makes.
        rounds: How many turns each has.
        steps: How many steps a turn has; None for those of about two seconds.
        timeout: How long a start or a turn may take, in seconds.

    Returns:
        The jobs, which have ended, and the blocks of each, of which the first is the warm-up.

    Raises:
        JobError: A job failed, their models differ in size, or one does not learn.
    """
    jobs: list[RunningJob] = []
    blocks: list[list[Block]] = [[], []]
    with contextlib.ExitStack() as stack:
        # One after the other: a start takes all cores.
        for job, own in zip(sides, blocks, strict=True):
            jobs.append(stack.enter_context(RunningJob(job, model, sizes, peers, timeout)))
            own.append(jobs[-1].block(_WARM_UP))
        if jobs[0].parameters != jobs[1].parameters:
            raise JobError(
                f"The models must have the same size. Received: {sides[0].title} with {jobs[0].parameters:,} "
                f"parameters, and {sides[1].title} with {jobs[1].parameters:,}."
            )
        if steps is None:
            slower = max(own[0].seconds for own in blocks)
            steps = max(_LEAST_STEPS, math.ceil(_TURN / slower))
        for number in range(rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                blocks[index].append(jobs[index].block(steps))
    for job, (first, *_, last) in zip(sides, blocks, strict=True):
        if first.loss is not None and last.loss is not None and not last.loss < first.loss:
            raise JobError(
                f"{job.title} does not learn: its loss was {first.loss:.4f} at first, "
                f"{last.loss:.4f} at last."
            )
    return jobs, blocks
