"""`tfdist-bench`: measures collectives, or training beside that of others."""

from __future__ import annotations

import sys

from tfdist.benchmarks import buckets, collectives, environments, peak, scaling, training
from tfdist.launch import command

__all__ = ["PROGRAMS", "run"]

PROGRAMS = {
    "buckets": buckets.PROGRAM,
    "collectives": collectives.PROGRAM,
    "peak": peak.PROGRAM,
    "scaling": scaling.PROGRAM,
    "training": training.PROGRAM,
    "peers": environments.PROGRAM,
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
        "collectives (time and bandwidth between ranks), peak (the most that a rank does), scaling "
        "(speed-up and efficiency of a training over its ranks), training (times of a step beside those of "
        "other libraries) or peers (makes environments for these); tfdist-bench PROGRAM --help tells more.",
    )


if __name__ == "__main__":
    run()
