"""`tfdist-bench scaling`: the measured and predicted scaling of a training with its ranks.

    tfdist-bench scaling --script=train.py --ranks=1,2,4
    tfdist-bench scaling --script="train.py --batch_size={batch}" --batch=64 --picture=scaling.png

Runs the script under `tfdist-run` with each number of ranks, in turn, and times the steps of its `fit` after
a warm-up; then it ends the script. With --batch it passes the rows of an update to the script, by `{batch}` in
its arguments or the variable TFDIST_BENCH_BATCH: the same number for strong scaling, and proportional to the
ranks for weak scaling. The planner's prediction is based on the machine of --machine, or on the measured step
of one rank and the measured all-reduce.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from tfdist.addons.planner.calibration import read_machine
from tfdist.launch.bench.scaling_report import Curve, Job, picture
from tfdist.launch.flags import command
from tfdist.launch.flags.values import (
    MOST_RANKS,
    YEAR,
    FlagDefiner,
    UsageError,
    input_file,
    output_file,
    refuse,
    refuse_ignored,
)
from tfdist.launch.run.num_ranks import count_cores, count_gpus
from tfdist.launch.signals import exit_on_signals
from tfdist.runtime.sessions import run_in_session
from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

#: The environment variable with the rows of an update.
BATCH = "TFDIST_BENCH_BATCH"
#: The prefix of a rank's line of results.
MARK = "tfdist-bench-scaling "
#: Reference models, with the rows of an update.
MODELS = {"convnet": 128, "gpt": 16}
_REFERENCE = Path(__file__).with_name("reference_training.py")

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_SCRIPT = _define.string(
    "script", None, "A Python script with its arguments, 'train.py --epochs=1'"
)
_MODEL = _define.enum("model", None, list(MODELS), "A reference model instead")
_RANKS = _define.list("ranks", "1,2", "Numbers of ranks; the smallest is the baseline")
_BATCH = _define.integer(
    "batch",
    None,
    "Rows of an update on the fewest ranks, for {batch} [the script's default]",
    lower_bound=1,
    upper_bound=1 << 30,
)
_ENGINE = _define.enum("engine", "auto", ["auto", "horovod", "tensorflow"], "As for tfdist-run")
_HOSTS = _define.string("H", None, "Hosts and their slots, as for tfdist-run [this machine]")
_THREADS = _define.integer(
    "threads",
    None,
    "Threads and cores per rank, in all jobs [cores / most ranks]",
    lower_bound=1,
    upper_bound=4096,
)
_STEPS = _define.integer("steps", 20, "Timed steps per job", lower_bound=4, upper_bound=1_000_000)
_WARM_UP = _define.integer(
    "warm_up", 5, "Steps before the timed ones", lower_bound=1, upper_bound=1_000_000
)
_ROUNDS = _define.integer("rounds", 3, "Jobs of each kind", lower_bound=1, upper_bound=1000)
_MACHINE = _define.string("machine", None, "A file of tfdist-plan calibrate, for the prediction")
_JSON = _define.string("json", None, "A file for the results")
_PICTURE = _define.string("picture", None, "File for a plot of the curves (.png, .svg, .pdf)")
_TIMEOUT = _define.float(
    "timeout", 600.0, "Time limit of a job in seconds", lower_bound=1.0, upper_bound=YEAR
)

#: The line of a rank, after the prefix of tfdist-run.
_LINE = re.compile(rf"^(?:\[[^\]]*\] )?{MARK}(\{{.*\}})$", re.MULTILINE)
_ERROR = re.compile(r"(?:\[[^\]]*\] )?[\w.]*(?:Error|Exception)\b.*|tfdist-run: .*")
#: The relative tolerance of the rows of a step, because the last batch of an epoch may be smaller.
_ROWS_OFF = 0.1


class ScalingError(TfdistError):
    """The script cannot be measured, or has failed; with a one-line message."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a rank.

    Attributes:
        steps: Number of timed steps.
        warm_up: Number of steps before them.
        batch: Rows of an update, for the script; None for the script's default.
        machine: A calibrated machine, as JSON; None to use `flops` and the measured link.
        flops: FLOP/s of one rank; None if this job determines it.
        cores: Cores of this machine per rank; None for all.
    """

    steps: int
    warm_up: int
    batch: int | None = None
    machine: dict[str, Any] | None = None
    flops: float | None = None
    cores: int | None = None


class _Run(NamedTuple):
    """A checked command line."""

    words: list[str]
    ranks: list[int]
    batch: int | None
    threads: int
    machine: dict[str, Any] | None

    def has_devices(self) -> bool:
        """Whether ranks compute on GPUs or other hosts instead of this machine's cores."""
        return bool(_HOSTS.value or count_gpus())

    def crowded(self) -> frozenset[int]:
        """The numbers of ranks that have more threads than there are cores."""
        if self.has_devices():
            return frozenset()
        return frozenset(each for each in self.ranks if each * self.threads > count_cores())


def _check(_: list[str]) -> _Run:
    if (_SCRIPT.value is None) == (_MODEL.value is None):
        raise UsageError(
            "tfdist-bench scaling requires either --script=train.py or --model=convnet|gpt. Received: "
            f"--script={_SCRIPT.value}, --model={_MODEL.value}."
        )
    if _JSON.value is not None:
        output_file("json", _JSON.value)
    if _PICTURE.value is not None:
        output_file("picture", _PICTURE.value, (".png", ".svg", ".pdf"))
    ranks = _numbers(_RANKS.value)
    batch = _BATCH.value or MODELS.get(_MODEL.value or "")
    if _MODEL.value is not None:
        words = [str(_REFERENCE), _MODEL.value, "{batch}"]
    else:
        words = _words(_SCRIPT.value)
    if batch is None and any("{batch}" in word for word in words):
        raise UsageError(
            "--script with {batch} requires --batch. Received: no --batch. Use, for example, --batch=64."
        )
    if _HOSTS.value is not None:
        refuse_ignored(_VALUES, (_THREADS,), "cannot be combined with -H", "-H")
    threads = _THREADS.value or max(count_cores() // max(ranks), 1)
    return _Run(words, ranks, batch, threads, _machine())


def _numbers(texts: Sequence[str]) -> list[int]:
    try:
        found = sorted({int(text) for text in texts})
    except ValueError:
        found = []
    if len(found) < 2 or not 1 <= found[0] <= found[-1] <= MOST_RANKS:
        raise refuse("ranks", ",".join(texts), "two or more numbers of ranks, such as 1,2,4")
    return found


def _words(script: str) -> list[str]:
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--script is not valid: {error}. Received: {script!r}.") from None
    if not words:
        raise refuse("script", script, "a Python script and its arguments")
    input_file("script", words[0])
    return words


def _machine() -> dict[str, Any] | None:
    if _MACHINE.value is None:
        return None
    input_file("machine", _MACHINE.value)
    try:
        return dataclasses.asdict(read_machine(os.path.expanduser(_MACHINE.value)))
    except (OSError, ValueError) as error:
        raise UsageError(f"--machine cannot be used: {error}") from None


def _main(run: _Run) -> int:
    try:
        with exit_on_signals():
            curves = _measure(run)
    except ScalingError as error:
        raise command.Failure(str(error)) from None
    print("\n\n".join(curve.table() for curve in curves))
    try:
        if _JSON.value:
            found = {curve.name: curve.as_json() for curve in curves}
            about = {"command": run.words, "threads": run.threads}
            Path(_JSON.value).write_text(json.dumps({**about, **found}, indent=1) + "\n")
        if _PICTURE.value:
            picture(Path(_PICTURE.value), curves)
    except (OSError, ImportError) as error:
        raise UsageError(f"The results cannot be written: {error}") from None
    return 0


def _measure(run: _Run) -> list[Curve]:
    """Measure the curves of all rounds."""
    base = run.ranks[0]
    strong: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    weak: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    takes_batch, flops = run.batch is not None, None
    for number in range(_ROUNDS.value):
        # The order alternates, so that a slowdown of the machine does not look like a cost of ranks.
        for ranks in run.ranks if number % 2 == 0 else run.ranks[::-1]:
            strong[ranks].append(_job(run, ranks, run.batch, flops))
            if ranks == base:
                flops = flops or strong[base][0].flops
            elif takes_batch:
                grown = _job(run, ranks, (run.batch or 0) * ranks // base, flops)
                takes_batch = number > 0 or not _is_near(grown.rows, strong[ranks][0].rows)
                weak[ranks].append(grown)
    weak[base] = strong[base]
    if run.batch is not None and not takes_batch:
        command.say(
            "tfdist-bench",
            "--batch does not change the rows of a step, so only strong scaling is measured. The script must "
            "use {batch} in its arguments or TFDIST_BENCH_BATCH.",
        )
    crowded = run.crowded()
    curves = [_named(Curve(False, strong, crowded))]
    if takes_batch and not curves[0].weak:
        curves.append(Curve(True, weak, crowded))
    return curves


def _is_near(one: float, other: float) -> bool:
    return bool(other) and abs(one / other - 1) < _ROWS_OFF


def _named(curve: Curve) -> Curve:
    """Classify the curve by the rows of its steps: a script may use a fixed batch per rank.

    Raises:
        ScalingError: Neither the rows of a step nor the rows per rank are constant.
    """
    base, one = curve.base, curve.rows(curve.base)
    if all(_is_near(curve.rows(n), one) or not one for n in curve.jobs):
        return curve
    if all(_is_near(curve.rows(n), one * n / base) for n in curve.jobs):
        command.say(
            "tfdist-bench",
            "The script uses a fixed number of rows per rank, so this is weak scaling.",
        )
        return dataclasses.replace(curve, weak=True)
    rows = ", ".join(f"{curve.rows(n)} on {n} ranks" for n in curve.jobs)
    raise ScalingError(
        "The rows of a step must be the same on all numbers of ranks, or proportional to the ranks. "
        f"Received: {rows}."
    )


def _job(run: _Run, ranks: int, batch: int | None, flops: float | None) -> Job:
    """Run the script on a number of ranks.

    Raises:
        ScalingError: The script failed, or has too few steps of `fit`.
    """
    settings = Settings(
        steps=_STEPS.value,
        warm_up=_WARM_UP.value,
        batch=batch,
        machine=run.machine,
        flops=flops,
        cores=None if run.has_devices() else run.threads,
    )
    script = [word.replace("{batch}", str(batch)) for word in run.words]
    hosts = ["-H", _HOSTS.value] if _HOSTS.value else []
    words = [sys.executable, "-m", "tfdist.launch.run.main", f"-np={ranks}", *hosts,
             f"--engine={_ENGINE.value}", "--", sys.executable, "-m",
             "tfdist.launch.bench.scaling_rank", json.dumps(dataclasses.asdict(settings)), *script]  # fmt: skip
    try:
        done = run_in_session(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **_threads(run)},
            timeout=_TIMEOUT.value,
        )
    except subprocess.TimeoutExpired:
        raise ScalingError(
            f"{ranks} ranks did not end within --timeout={_TIMEOUT.value:g} seconds."
        ) from None
    found = [json.loads(text) for text in _LINE.findall(done.stdout)]
    if len(found) == ranks:
        slowest = max(found, key=lambda each: each["seconds"])
        known = {field.name for field in dataclasses.fields(Job)}
        return Job(**{name: slowest[name] for name in known & slowest.keys()})
    errors = [line for line in done.stdout.splitlines() if _ERROR.match(line)]
    if done.returncode:
        said = f": {one_line(errors[0])}" if errors else "."
        raise ScalingError(
            f"{script[0]} failed on {ranks} ranks with exit code {done.returncode}{said}"
        )
    raise ScalingError(
        f"{script[0]} did not run {_WARM_UP.value} + {_STEPS.value} steps of a Keras `fit` on {ranks} ranks, "
        "not counting the last batch of each epoch. Train more epochs, or lower --steps and --warm_up."
    )


def _threads(run: _Run) -> dict[str, str]:
    if _HOSTS.value is not None:
        return {}
    threads = str(run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": str(max(run.threads, 2)),
    }


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-bench scaling [flags]",
    summary="Times the steps of a training on several numbers of ranks, and prints speed-up and efficiency "
    "of strong and weak scaling, with the planner's predictions.",
    check=_check,
)


if __name__ == "__main__":
    PROGRAM.run()
