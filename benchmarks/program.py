"""`tfdist-bench`: measures collectives, or training beside that of others."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tfdist.benchmarks import collectives, environments, training
from tfdist.launch import command

__all__ = ["run"]

_PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "collectives": collectives.run,
    "training": training.run,
    "peers": environments.run,
}


def run() -> None:
    """The console script."""
    program, *words = sys.argv
    if words and words[0] in _PROGRAMS:
        _PROGRAMS[words[0]]([program, *words[1:]])
    command.run_without_choice(
        sys.argv,
        "A program",
        ", ".join(_PROGRAMS),
        usage="tfdist-bench PROGRAM [flags]",
        summary="Measures. PROGRAM is collectives (time and bandwidth between ranks), training "
        "(times of a step beside those of other libraries) or peers (makes environments for "
        "these); tfdist-bench PROGRAM --help tells more.",
    )


if __name__ == "__main__":
    run()
