"""`tfdist-launch`: write a Slurm script or Kubernetes objects that run a command on many ranks.

tfdist-launch slurm -np 8 --nodes=2 --time=12h -- python train.py > job.sh
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType

from tfdist.launch.flags import command
from tfdist.launch.flags.values import output_file
from tfdist.launch.submit import kubernetes, sbatch

_SCHEDULERS = {"slurm": sbatch, "kubernetes": kubernetes}


def run() -> None:
    """Run the console script."""
    program, *words = sys.argv
    if words and words[0] in PROGRAMS:
        PROGRAMS[words[0]].run([program, *words[1:]])
    names = " or ".join(_SCHEDULERS)
    command.run_without_choice(
        sys.argv,
        "The scheduler",
        names,
        usage="tfdist-launch SCHEDULER [flags] -- command [arguments]",
        summary="Writes a job for a scheduler that runs a command on many ranks. SCHEDULER is "
        f"{names}; see tfdist-launch SCHEDULER --help.",
    )


def _check(scheduler: ModuleType, words: list[str]) -> tuple[str, str | None]:
    """The text to write, and the file to write it to."""
    for word in words:
        if not word.isascii() and not word.encode(errors="replace").decode() == word:
            raise command.UsageError(f"The command must be UTF-8 text. Received: {word!r}.")
    options = scheduler.FLAGS.read()
    text, output = options.text(words), options.job.output
    if output is not None:
        output_file("output", output)
    return text, output


def _main(scheduler: ModuleType, checked: tuple[str, str | None]) -> int:
    text, output = checked
    if output is None:
        print(text, end="")
        return 0
    Path(output).write_text(text, encoding="utf-8")
    command.say("tfdist-launch", f"start it with: {scheduler.SUBMIT} {output}")
    return 0


#: The programs, by scheduler.
PROGRAMS = {
    name: command.Program(
        functools.partial(_main, scheduler),
        scheduler.FLAGS.values,
        usage=f"tfdist-launch {name} [flags] -- command [arguments]",
        summary=scheduler.SUMMARY,
        check=functools.partial(_check, scheduler),
        rest=True,
        folded=scheduler.FOLDED,
    )
    for name, scheduler in _SCHEDULERS.items()
}


if __name__ == "__main__":
    run()
