"""The Slurm batch script of a job, and the flags specific to Slurm."""

from __future__ import annotations

import dataclasses
import re
import shlex
import time

from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import UsageError, refuse
from tfdist.launch.submit.job_flags import OF_FAILURES, Job, JobOptions, in_units, refuse_odd
from tfdist.runtime import exit_codes

#: Seconds between saving and the time limit, for the ranks to end and the job to be requeued, and for the
#: coarse resolution of Slurm's clock.
_MARGIN_SECONDS = 60

#: Options of sbatch whose flags have other names.
_FLAGS = {"job-name": "name", "output": "log", "gpus-per-node": "gpu_type"}

#: Options of sbatch that the script always sets, and their flags.
_TAKEN = {
    **dict.fromkeys(("--job-name", "-J"), "--name"),
    **dict.fromkeys(("--nodes", "-N"), "--nodes"),
    **dict.fromkeys(("--ntasks", "-n"), "-np"),
    **dict.fromkeys(("--ntasks-per-node",), "--ranks_per_node"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "--cpus"),
    **dict.fromkeys(("--mem", "--mem-per-cpu", "--mem-per-gpu"), "--memory"),
    **dict.fromkeys(("--gpus", "-G", "--gpus-per-node", "--gpus-per-task"), "--gpu"),
    **dict.fromkeys(("--time", "-t"), "--time"),
    **dict.fromkeys(("--partition", "-p"), "--partition"),
    **dict.fromkeys(("--account", "-A"), "--account"),
    **dict.fromkeys(("--chdir", "-D"), "--chdir"),
    **dict.fromkeys(("--output", "-o", "--open-mode"), "--log"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "--requeue"),
    **dict.fromkeys(("--signal",), "--save_seconds"),
}
_WORD = re.compile(r"\w[\w.,:@+%=-]*", re.ASCII)
#: The name is part of the log's file name, whose length file systems limit.
_MOST_OF_A_NAME = 128

SUMMARY = (
    "Writes a Slurm batch script that runs a command on many ranks, lets them save before the time "
    "limit, and requeues the job."
)
#: The command that submits the script.
SUBMIT = "sbatch"


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """The options specific to Slurm, and those of the job; see the flags of the same names."""

    job: JobOptions = dataclasses.field(default_factory=JobOptions)
    partition: str | None = option(None, "Partition of the cluster")
    account: str | None = option(None, "Account to charge")
    setup: tuple[str, ...] = option((), "Shell line to run first", is_repeated=True)
    log: str = option("%x-%j.out", "Log file; %x is the job's name, %j its number")
    requeue: bool = option(True, "Requeue the job after it has saved, unless it was cancelled")
    engine: str | None = option(
        None, "As for tfdist-run", choices=("auto", "horovod", "tensorflow")
    )
    gpu_type: str | None = option(None, "GPU type, as Slurm names it")
    sbatch: tuple[str, ...] = option(
        (), "Further option of sbatch, such as --sbatch=--qos=high", is_repeated=True
    )

    def text(self, command: list[str]) -> str:
        """The batch script for a command.

        Raises:
            UsageError: Options are invalid or incompatible.
        """
        job = self.job.job(command)
        if not job.gpu:
            refuse_ignored(self, ["gpu_type"], "requires --gpu", "alone")
        for each in self.sbatch:
            _check_option(each)
        if len(job.name) > _MOST_OF_A_NAME:
            raise refuse("name", job.name, f"at most {_MOST_OF_A_NAME} characters")
        words = {"name": job.name, "partition": self.partition, "account": self.account}
        for flag, word in {**words, "gpu_type": self.gpu_type}.items():
            if word is not None:
                refuse_odd(f"--{flag}", word)
                if _WORD.fullmatch(word) is None:
                    raise refuse(
                        flag, word, "letters and digits, and .,:@+%=- after the first character"
                    )
        return batch_script(job, self)


FLAGS = define_flags(SlurmOptions)
FOLDED = {
    "for failures": [*OF_FAILURES, "requeue"],
    "for Slurm": ["log", "gpu_type", "engine", "sbatch"],
}


def _check_option(option: str) -> None:
    """Reject invalid options of sbatch, and those that the script sets."""
    found = re.fullmatch(r"(--[a-z][a-z-]*|-[A-Za-z])(?:[= ]?(.*))", option)
    if found is None:
        raise UsageError(
            f"--sbatch must be an option of sbatch, such as --sbatch=--qos=high. Received: {option!r}."
        )
    flag = _TAKEN.get(found[1])
    if flag is not None:
        raise UsageError(
            f"--sbatch cannot set what the script already sets: use {flag}. Received: "
            f"--sbatch={option}."
        )


def batch_script(job: Job, options: SlurmOptions) -> str:
    """Write the batch script.

    Raises:
        UsageError: The time limit is too short to save, or a value would be misinterpreted.
    """
    lines = ["#!/bin/bash", *_directives(job, options), ""]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in job.variables.items()]
    lines += [*options.setup, "", *_start(job, options), *_SIGNALS.strip().splitlines()]
    if options.requeue:
        lines += ["", *_REQUEUE_LINES.strip().splitlines()]
    return "\n".join([*lines, "", 'exit "$code"', ""])


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    lead = job.save_seconds + _MARGIN_SECONDS
    if job.seconds is not None and job.seconds <= lead:
        raise UsageError(
            f"--time must be longer than {lead} s, the time before the limit at which the ranks save. "
            f"Received: {job.seconds} s, --save_seconds={job.save_seconds}."
        )
    gpus = None
    if job.gpu:
        gpus = ":".join(filter(None, [options.gpu_type, str(job.ranks_per_node)]))
    memory = None if job.memory is None else in_units(job.memory * job.ranks_per_node)
    given = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "cpus-per-task": str(job.cpus),
        "mem": memory,
        "gpus-per-node": gpus,
        "time": None if job.seconds is None else _clock(job.seconds),
        "partition": options.partition,
        "account": options.account,
        "chdir": job.directory,
        "output": options.log,
        "open-mode": "append",
        "signal": f"B:USR1@{lead}",
    }
    lines = []
    for name, value in given.items():
        if value is not None:
            refuse_odd(f"--{_FLAGS.get(name, name)}", value)
            lines.append(f"#SBATCH --{name}={value}")
    lines.append(f"#SBATCH --{'requeue' if options.requeue else 'no-requeue'}")
    return [*lines, *(f"#SBATCH {option}" for option in options.sbatch)]


def _start(job: Job, options: SlurmOptions) -> list[str]:
    words = ["tfdist-run", "-np", str(job.num_ranks), f"--save_seconds={job.save_seconds}"]
    if options.engine is not None:
        words.append(f"--engine={options.engine}")
    if job.max_restarts:
        words.append(f"--max_restarts={job.max_restarts}")
    return [
        "# tfdist-run reads the nodes from Slurm's variables. It runs in the background, because the",
        "# shell handles no signal while it waits for a foreground command.",
        f"{shlex.join([*words, '--', *job.command])} &",
    ]


def _clock(seconds: int) -> str:
    days, seconds = divmod(seconds, 86_400)
    clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
    return f"{days}-{clock}" if days else clock


#: A cancelled job gets the same SIGTERM as one whose time is up, but must not be requeued; so Slurm sends
#: another signal before the time limit.
_SIGNALS = """
ranks=$!
cause=
trap 'signaled=yes cause=${cause:-time}; kill -TERM "$ranks" 2> /dev/null' USR1  # Time is nearly up.
trap 'signaled=yes cause=${cause:-end}; kill -TERM "$ranks" 2> /dev/null' TERM   # Cancelled, preempted.

# A signal interrupts the wait while the ranks save, so wait again.
signaled=yes
while [ -n "$signaled" ]; do
  signaled=
  wait "$ranks"
  code=$?
done
"""

_REQUEUE_LINES = f"""
# Code {exit_codes.PREEMPTED}: the ranks have saved, and resume from there after a restart.
if [ "$code" -eq {exit_codes.PREEMPTED} ] && [ "$cause" != end ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
