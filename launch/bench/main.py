"""`tfdist-bench`: measure collectives, buckets, the peak of a rank, and the scaling of a training."""

from __future__ import annotations

import sys

from tfdist.launch.bench import buckets, collectives, peak, scaling
from tfdist.launch.flags import command

PROGRAMS = {
    "buckets": buckets.PROGRAM,
    "collectives": collectives.PROGRAM,
    "peak": peak.PROGRAM,
    "scaling": scaling.PROGRAM,
}


def run() -> None:
    """Run the console script."""
    program, *words = sys.argv
    if words and words[0] in PROGRAMS:
        PROGRAMS[words[0]].run([program, *words[1:]])
    command.run_without_choice(
        sys.argv,
        "A program",
        ", ".join(PROGRAMS),
        usage="tfdist-bench PROGRAM [flags]",
        summary="Runs a benchmark. PROGRAM is buckets (the best size of gradient buckets), collectives "
        "(time and bandwidth between ranks), peak (the peak rate of a rank) or scaling (speed-up and "
        "efficiency of a training over its ranks); see tfdist-bench PROGRAM --help.",
    )


if __name__ == "__main__":
    run()
