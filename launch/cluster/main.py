"""`tfdist-launch`: writes what Slurm or Kubernetes needs to run a command on many ranks.

tfdist-launch slurm -np 8 --nodes=2 --time=12h -- python train.py > job.sh
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags

from tfdist.launch import command
from tfdist.launch.cluster import kubernetes, sbatch

__all__ = ["run"]


@dataclasses.dataclass(frozen=True)
class _Scheduler:
    """What a scheduler is told in.

    Attributes:
        values: Its flags.
        write: Returns the text, for a command.
        summary: What the text is, for the help.
        folded: Flags that the help only names.
        submit: The program that takes the text.
    """

    values: flags.FlagValues
    write: Callable[[list[str]], str]
    summary: str
    folded: Mapping[str, Sequence[str]]
    submit: str


_SCHEDULERS = {
    "slurm": _Scheduler(
        values=sbatch.VALUES,
        write=sbatch.from_flags,
        summary="Writes a batch script for Slurm that runs a command on many ranks, lets them save "
        "before the time is up, and queues the job again.",
        folded=sbatch.FOLDED,
        submit="sbatch",
    ),
    "kubernetes": _Scheduler(
        values=kubernetes.VALUES,
        write=kubernetes.from_flags,
        summary="Writes what runs a command on many ranks in Kubernetes.",
        folded=kubernetes.FOLDED,
        submit="kubectl apply -f",
    ),
}
_OUTPUTS = {
    name: flags.DEFINE_string(
        "output", None, "A file to write to, in place of stdout", flag_values=scheduler.values
    )
    for name, scheduler in _SCHEDULERS.items()
}


def run() -> None:
    """The console script."""
    program, *words = sys.argv
    if words and words[0] in _SCHEDULERS:
        scheduler = _SCHEDULERS[words[0]]
        command.run(
            functools.partial(_main, words[0]),
            scheduler.values,
            usage=f"tfdist-launch {words[0]} [flags] -- command [arguments]",
            summary=scheduler.summary,
            rest=True,
            folded=scheduler.folded,
            arguments=[program, *words[1:]],
        )
    names = " or ".join(_SCHEDULERS)
    command.run_without_choice(
        sys.argv,
        "The scheduler",
        names,
        usage="tfdist-launch SCHEDULER [flags] -- command [arguments]",
        summary="Writes what a scheduler needs to run a command on many ranks. SCHEDULER is "
        f"{names}; tfdist-launch SCHEDULER --help tells more.",
    )


def _main(name: str, words: list[str]) -> int:
    text = _SCHEDULERS[name].write(words)
    output = _OUTPUTS[name].value
    if output is None:
        print(text, end="")
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise command.UsageError(
            f"--output={output} cannot be written: {error.strerror}."
        ) from error
    command.say("tfdist-launch", f"to start it: {_SCHEDULERS[name].submit} {output}")
    return 0


if __name__ == "__main__":
    run()
