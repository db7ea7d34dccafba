"""`tfdist-schedule`: print a pipeline schedule by clock ticks, and its cost.

tfdist-schedule --schedule=1f1b --stages=4 --microbatches=8
"""

from __future__ import annotations

import dataclasses

from tfdist.addons.monitoring.timeline import (
    as_text,
    held_microbatches,
    legend,
    save_picture,
    write_chrome_trace,
)
from tfdist.launch.flags import command
from tfdist.launch.flags.options import as_given, define_flags, option
from tfdist.launch.flags.values import output_file
from tfdist.pipeline.schedules import SCHEDULES, Action, check_arguments, make_schedule
from tfdist.pipeline.simulation import check_schedule

#: The supported formats of plots, by suffix.
_PICTURES = (".png", ".svg", ".pdf")
#: The most forward passes of a printed schedule: those of 256 ranks with 400 micro-batches.
_MOST_FORWARDS = 102_400


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """The options of the program; see the flags of the same names."""

    schedule: str = option("1f1b", "Schedule", choices=SCHEDULES)
    stages: int = option(4, "Ranks of the pipeline", least=1)
    microbatches: int = option(8, "Micro-batches per batch", least=1)
    chunks: int | None = option(None, "Stages per rank, for interleaved [2]", least=1)
    picture: str | None = option(None, "File for a plot of the schedule (.png, .svg, .pdf)")
    trace: str | None = option(None, "File for a Chrome or Perfetto trace")

    @property
    def chosen(self) -> tuple[str, int, int, int | None]:
        """The arguments of `make_schedule`."""
        return self.schedule, self.stages, self.microbatches, self.chunks


_FLAGS = define_flags(ScheduleOptions)


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> ScheduleOptions:
    options = _FLAGS.read()
    try:
        check_arguments(*options.chosen, most=_MOST_FORWARDS)
    except ValueError as error:
        given = as_given(options, ("schedule", "stages", "microbatches", "chunks"))
        raise command.UsageError(f"{given} is not supported: {error}") from None
    if options.picture is not None:
        output_file("picture", options.picture, _PICTURES)
    if options.trace is not None:
        output_file("trace", options.trace)
    return options


def _main(options: ScheduleOptions) -> int:
    schedule = make_schedule(*options.chosen)
    played = check_schedule(schedule)
    kinds = {Action.FORWARD, Action.BACKWARD} | (
        {Action.WEIGHT} if schedule.splits_backward else set()
    )
    ratio = played.idle_share / (1 - played.idle_share)
    print(as_text(schedule))
    print()
    print(f"{legend(kinds)}; . idle")
    print(
        f"If a forward pass and each half of a backward pass take equal time, ranks are idle for "
        f"{played.idle_share:.1%} of the step, or {ratio:.1%} of their compute time."
    )
    held = ", ".join(str(held_microbatches(schedule, rank)) for rank in range(schedule.num_ranks))
    print(f"Peak number of micro-batches whose activations a rank stores, by rank: {held}.")
    if options.picture is not None:
        try:
            save_picture(played, options.picture)
        except (ValueError, ImportError) as error:
            raise command.UsageError(
                f"--picture={options.picture} could not be written: {error}."
            ) from None
    if options.trace is not None:
        write_chrome_trace(played, options.trace)
    return 0


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-schedule [flags]",
    summary="Prints the micro-batches of each rank by time, and the idle time of ranks.",
    check=_check,
)


if __name__ == "__main__":
    run()
