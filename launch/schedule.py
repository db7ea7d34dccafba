"""`tfdist-schedule`: print a pipeline schedule by clock ticks, and its cost.

tfdist-schedule --schedule=1f1b --stages=4 --microbatches=8
"""

from __future__ import annotations

from absl import flags

from tfdist.addons.monitoring.timeline import (
    as_text,
    held_microbatches,
    legend,
    save_picture,
    write_chrome_trace,
)
from tfdist.launch.flags import command
from tfdist.launch.flags.values import FlagDefiner, as_given, output_file
from tfdist.pipeline.schedules import SCHEDULES, Action, check_arguments, make_schedule
from tfdist.pipeline.simulation import check_schedule

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_SCHEDULE = _define.enum("schedule", "1f1b", list(SCHEDULES), "Schedule")
_STAGES = _define.integer("stages", 4, "Ranks of the pipeline", lower_bound=1)
_MICROBATCHES = _define.integer("microbatches", 8, "Micro-batches per batch", lower_bound=1)
_CHUNKS = _define.integer("chunks", None, "Stages per rank, for interleaved [2]", lower_bound=1)
_PICTURE = _define.string("picture", None, "File for a plot of the schedule (.png, .svg, .pdf)")
_TRACE = _define.string("trace", None, "File for a Chrome or Perfetto trace")


#: The supported formats of plots, by suffix.
_PICTURES = (".png", ".svg", ".pdf")
#: The most forward passes of a printed schedule: those of 256 ranks with 400 micro-batches.
_MOST_FORWARDS = 102_400


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> None:
    chosen = (_SCHEDULE, _STAGES, _MICROBATCHES, _CHUNKS)
    try:
        check_arguments(
            _SCHEDULE.value,
            _STAGES.value,
            _MICROBATCHES.value,
            _CHUNKS.value,
            most=_MOST_FORWARDS,
        )
    except ValueError as error:
        raise command.UsageError(f"{as_given(_VALUES, chosen)} is not supported: {error}") from None
    if _PICTURE.value is not None:
        output_file("picture", _PICTURE.value, _PICTURES)
    if _TRACE.value is not None:
        output_file("trace", _TRACE.value)


def _main(_: None) -> int:
    schedule = make_schedule(_SCHEDULE.value, _STAGES.value, _MICROBATCHES.value, _CHUNKS.value)
    played = check_schedule(schedule)
    kinds = {Action.FORWARD, Action.BACKWARD} | (
        {Action.WEIGHT} if schedule.splits_backward else set()
    )
    print(as_text(schedule))
    print()
    print(f"{legend(kinds)}; . idle")
    print(
        f"If a forward pass and each half of a backward pass take equal time, ranks are idle for "
        f"{played.idle_share:.1%} of the step, or {played.idle_over_ideal:.1%} of their compute time."
    )
    held = ", ".join(str(held_microbatches(schedule, rank)) for rank in range(schedule.num_ranks))
    print(f"Peak number of micro-batches whose activations a rank stores, by rank: {held}.")
    if _PICTURE.value is not None:
        try:
            save_picture(played, _PICTURE.value)
        except (ValueError, ImportError) as error:
            raise command.UsageError(
                f"--picture={_PICTURE.value} could not be written: {error}."
            ) from None
    if _TRACE.value is not None:
        write_chrome_trace(played, _TRACE.value)
    return 0


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-schedule [flags]",
    summary="Prints the micro-batches of each rank by time, and the idle time of ranks.",
    check=_check,
)


if __name__ == "__main__":
    run()
