"""`tfdist-schedule`: prints a pipeline schedule as a clock, and what it costs.

tfdist-schedule --schedule=1f1b --stages=4 --microbatches=8
"""

from __future__ import annotations

from absl import flags

from tfdist.launch import command
from tfdist.pipeline.schedules import SCHEDULES, Kind, make_schedule
from tfdist.pipeline.simulation import check, held_microbatches
from tfdist.pipeline.timeline import as_text, legend, save_picture, write_chrome_trace

__all__ = ["run"]

_VALUES = flags.FlagValues()
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "1f1b", list(SCHEDULES), "Which schedule.", flag_values=_VALUES
)
_STAGES = flags.DEFINE_integer(
    "stages", 4, "Ranks of the pipeline.", lower_bound=1, flag_values=_VALUES
)
_MICROBATCHES = flags.DEFINE_integer(
    "microbatches", 8, "Micro-batches of a batch.", lower_bound=1, flag_values=_VALUES
)
_CHUNKS = flags.DEFINE_integer(
    "chunks", None, "Stages on each rank, for interleaved [2].", lower_bound=1, flag_values=_VALUES
)
_PICTURE = flags.DEFINE_string(
    "picture", None, "Draw it into this file (.png, .svg, .pdf).", flag_values=_VALUES
)
_TRACE = flags.DEFINE_string(
    "trace", None, "Write it as a trace for Chrome or Perfetto.", flag_values=_VALUES
)


def run() -> None:
    """The console script."""
    command.run(
        _main,
        _VALUES,
        usage="tfdist-schedule [flags]",
        summary="Prints which rank works on which micro-batch when, and how long ranks are idle.",
    )


def _main(_: list[str]) -> int:
    try:
        schedule = make_schedule(_SCHEDULE.value, _STAGES.value, _MICROBATCHES.value, _CHUNKS.value)
    except ValueError as error:
        raise command.UsageError(str(error)) from None
    played = check(schedule)
    kinds = {Kind.FORWARD, Kind.BACKWARD} | ({Kind.WEIGHT} if schedule.splits_backward else set())
    print(as_text(schedule))
    print()
    print(f"{legend(kinds)}; . idle")
    print(
        f"If a forward and each half of a backward take equal time, ranks are idle for "
        f"{played.idle_share:.1%} of the step, {played.idle_over_ideal:.1%} of the time that they "
        "compute."
    )
    held = ", ".join(str(held_microbatches(schedule, rank)) for rank in range(schedule.num_ranks))
    print(f"Micro-batches whose activations a rank holds at most, rank 0 first: {held}.")
    try:
        if _PICTURE.value:
            save_picture(played, _PICTURE.value)
        if _TRACE.value:
            write_chrome_trace(played, _TRACE.value)
    except (OSError, ValueError, ImportError) as error:
        raise command.UsageError(f"The file cannot be written: {error}.") from None
    return 0


if __name__ == "__main__":
    run()
