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

from tfdist.addons.planner.calibration import read_machine
from tfdist.launch.bench.scaling_report import Curve, Job, picture
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import (
    MOST_RANKS,
    YEAR,
    UsageError,
    input_file,
    output_file,
    refuse,
)
from tfdist.launch.run.num_ranks import count_cores, count_gpus
from tfdist.launch.sessions import run_in_session
from tfdist.launch.signals import exit_on_signals
from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

#: The environment variable with the rows of an update.
BATCH = "TFDIST_BENCH_BATCH"
#: The prefix of a rank's line of results.
MARK = "tfdist-bench-scaling "
#: Reference models, with the rows of an update.
MODELS = {"convnet": 128, "gpt": 16}
_REFERENCE = Path(__file__).with_name("reference_training.py")

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


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """The options of the program; see the flags of the same names."""

    script: str | None = option(None, "A Python script with its arguments, 'train.py --epochs=1'")
    model: str | None = option(None, "A reference model instead", choices=MODELS)
    ranks: tuple[str, ...] = option(("1", "2"), "Numbers of ranks; the smallest is the baseline")
    batch: int | None = option(
        None,
        "Rows of an update on the fewest ranks, for {batch} [the script's default]",
        least=1,
        most=1 << 30,
    )
    engine: str = option("auto", "As for tfdist-run", choices=("auto", "horovod", "tensorflow"))
    H: str | None = option(None, "Hosts and their slots, as for tfdist-run [this machine]")
    threads: int | None = option(
        None, "Threads and cores per rank, in all jobs [cores / most ranks]", least=1, most=4096
    )
    steps: int = option(20, "Timed steps per job", least=4, most=1_000_000)
    warm_up: int = option(5, "Steps before the timed ones", least=1, most=1_000_000)
    rounds: int = option(3, "Jobs of each kind", least=1, most=1000)
    machine: str | None = option(None, "A file of tfdist-plan calibrate, for the prediction")
    json: str | None = option(None, "A file for the results")
    picture: str | None = option(None, "File for a plot of the curves (.png, .svg, .pdf)")
    timeout: float = option(600.0, "Time limit of a job in seconds", least=1.0, most=YEAR)


_FLAGS = define_flags(ScalingOptions)


class _Run(NamedTuple):
    """A checked command line."""

    options: ScalingOptions
    words: list[str]
    ranks: list[int]
    batch: int | None
    threads: int
    machine: dict[str, Any] | None

    def has_devices(self) -> bool:
        """Whether ranks compute on GPUs or other hosts instead of this machine's cores."""
        return bool(self.options.H or count_gpus())

    def crowded(self) -> frozenset[int]:
        """The numbers of ranks that have more threads than there are cores."""
        if self.has_devices():
            return frozenset()
        return frozenset(each for each in self.ranks if each * self.threads > count_cores())


def _check(_: list[str]) -> _Run:
    options = _FLAGS.read()
    if (options.script is None) == (options.model is None):
        raise UsageError(
            "tfdist-bench scaling requires either --script=train.py or --model=convnet|gpt. Received: "
            f"--script={options.script}, --model={options.model}."
        )
    if options.json is not None:
        output_file("json", options.json)
    if options.picture is not None:
        output_file("picture", options.picture, (".png", ".svg", ".pdf"))
    ranks = _numbers(options.ranks)
    batch = options.batch or MODELS.get(options.model or "")
    if options.model is not None:
        words = [str(_REFERENCE), options.model, "{batch}"]
    else:
        words = _words(options.script or "")
    if batch is None and any("{batch}" in word for word in words):
        raise UsageError(
            "--script with {batch} requires --batch. Received: no --batch. Use, for example, --batch=64."
        )
    if options.H is not None:
        refuse_ignored(options, ["threads"], "cannot be combined with -H", "-H")
    threads = options.threads or max(count_cores() // max(ranks), 1)
    return _Run(options, words, ranks, batch, threads, _machine(options.machine))


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


def _machine(file: str | None) -> dict[str, Any] | None:
    if file is None:
        return None
    input_file("machine", file)
    try:
        return dataclasses.asdict(read_machine(os.path.expanduser(file)))
    except (OSError, ValueError) as error:
        raise UsageError(f"--machine cannot be used: {error}") from None


def _main(run: _Run) -> int:
    try:
        with exit_on_signals():
            curves = _measure(run)
    except ScalingError as error:
        raise command.Failure(str(error)) from None
    print("\n\n".join(curve.table() for curve in curves))
    options = run.options
    try:
        if options.json:
            found = {curve.name: curve.as_json() for curve in curves}
            about = {"command": run.words, "threads": run.threads}
            Path(options.json).write_text(json.dumps({**about, **found}, indent=1) + "\n")
        if options.picture:
            picture(Path(options.picture), curves)
    except (OSError, ImportError) as error:
        raise UsageError(f"The results cannot be written: {error}") from None
    return 0


def _measure(run: _Run) -> list[Curve]:
    """Measure the curves of all rounds."""
    base = run.ranks[0]
    strong: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    weak: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    takes_batch, flops = run.batch is not None, None
    for number in range(run.options.rounds):
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
    options = run.options
    settings = Settings(
        steps=options.steps,
        warm_up=options.warm_up,
        batch=batch,
        machine=run.machine,
        flops=flops,
        cores=None if run.has_devices() else run.threads,
    )
    script = [word.replace("{batch}", str(batch)) for word in run.words]
    hosts = ["-H", options.H] if options.H else []
    words = [sys.executable, "-m", "tfdist.launch.run.main", f"-np={ranks}", *hosts,
             f"--engine={options.engine}", "--", sys.executable, "-m",
             "tfdist.launch.bench.scaling_rank", json.dumps(dataclasses.asdict(settings)), *script]  # fmt: skip
    try:
        done = run_in_session(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **_threads(run)},
            timeout=options.timeout,
        )
    except subprocess.TimeoutExpired:
        raise ScalingError(
            f"{ranks} ranks did not end within --timeout={options.timeout:g} seconds."
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
        f"{script[0]} did not run {options.warm_up} + {options.steps} steps of a Keras `fit` on {ranks} ranks, "
        "not counting the last batch of each epoch. Train more epochs, or lower --steps and --warm_up."
    )


def _threads(run: _Run) -> dict[str, str]:
    if run.options.H is not None:
        return {}
    threads = str(run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": str(max(run.threads, 2)),
    }


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-bench scaling [flags]",
    summary="Times the steps of a training on several numbers of ranks, and prints speed-up and efficiency "
    "of strong and weak scaling, with the planner's predictions.",
    check=_check,
)


if __name__ == "__main__":
    PROGRAM.run()
