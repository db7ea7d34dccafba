"""`tfdist-bench`: measures collectives, buckets, the peak of a rank, and the scaling of a training."""

from __future__ import annotations

import sys

from tfdist.launch import command
from tfdist.launch.bench import buckets, collectives, peak, scaling

PROGRAMS = {
    "buckets": buckets.PROGRAM,
    "collectives": collectives.PROGRAM,
    "peak": peak.PROGRAM,
    "scaling": scaling.PROGRAM,
}


def run() -> None:
    """The console script."""
    program, *words = sys.argv
    if words and words[0] in PROGRAMS:
        PROGRAMS[words[0]].run([program, *words[1:]])
    command.run_without_choice(
        sys.argv,
        "A program",
        ", ".join(PROGRAMS),
        usage="tfdist-bench PROGRAM [flags]",
        summary="Measures. PROGRAM is buckets (the size of gradient buckets that suits a network), "
        "collectives (time and bandwidth between ranks), peak (the most that a rank does) or scaling "
        "(speed-up and efficiency of a training over its ranks); tfdist-bench PROGRAM --help tells more.",
    )


if __name__ == "__main__":
    run()
