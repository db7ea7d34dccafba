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
from tfdist.launch.flag_values import output_file

__all__ = ["PROGRAMS", "run"]


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
    if words and words[0] in PROGRAMS:
        PROGRAMS[words[0]].run([program, *words[1:]])
    names = " or ".join(_SCHEDULERS)
    command.run_without_choice(
        sys.argv,
        "The scheduler",
        names,
        usage="tfdist-launch SCHEDULER [flags] -- command [arguments]",
        summary="Writes what a scheduler needs to run a command on many ranks. SCHEDULER is "
        f"{names}; tfdist-launch SCHEDULER --help tells more.",
    )


def _check(name: str, words: list[str]) -> str:
    """The text that is to be written."""
    for word in words:
        if not word.isascii() and not word.encode(errors="replace").decode() == word:
            raise command.UsageError(f"The command is a text in UTF-8. Received: {word!r}.")
    text = _SCHEDULERS[name].write(words)
    output = _OUTPUTS[name].value
    if output is not None:
        output_file("output", output)
    return text


def _main(name: str, text: str) -> int:
    output = _OUTPUTS[name].value
    if output is None:
        print(text, end="")
        return 0
    Path(output).write_text(text, encoding="utf-8")
    command.say("tfdist-launch", f"to start it: {_SCHEDULERS[name].submit} {output}")
    return 0


#: By scheduler.
PROGRAMS = {
    name: command.Program(
        functools.partial(_main, name),
        scheduler.values,
        usage=f"tfdist-launch {name} [flags] -- command [arguments]",
        summary=scheduler.summary,
        check=functools.partial(_check, name),
        rest=True,
        folded=scheduler.folded,
    )
    for name, scheduler in _SCHEDULERS.items()
}


if __name__ == "__main__":
    run()
