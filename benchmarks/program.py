"""`tfdist-bench`: measures collectives, or training beside that of others."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import flags

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
    names = ", ".join(_PROGRAMS)
    asks_for_help = words and words[0].lstrip("-") in ("help", "helpshort", "helpfull", "h")
    command.run(
        lambda _: _refuse(words, names),
        flags.FlagValues(),
        usage="tfdist-bench PROGRAM [flags]",
        summary="Measures. PROGRAM is collectives (time and bandwidth between ranks), training "
        "(times of a step beside those of other libraries) or peers (makes environments for "
        "these); tfdist-bench PROGRAM --help tells more.",
        arguments=[program, *(["--help"] if asks_for_help else [])],
    )


def _refuse(words: list[str], names: str) -> int:
    received = words[0] if words else "nothing"
    raise command.UsageError(f"A program comes first: {names}. Received: {received}.")


if __name__ == "__main__":
    run()
