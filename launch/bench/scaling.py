"""`tfdist-bench scaling`: how a training scales with its ranks, measured and planned.

    tfdist-bench scaling --script=train.py --ranks=1,2,4
    tfdist-bench scaling --script="train.py --batch_size={batch}" --batch=64 --picture=scaling.png

Runs the script under `tfdist-run` with each number of ranks, in turn, and times the steps of its `fit` after
a warm-up; then the script is ended. With --batch it tells the script how many rows an update has, by
`{batch}` in its arguments or the variable TFDIST_BENCH_BATCH: as many on all numbers of ranks for strong
scaling, and as many times more as there are ranks for weak scaling. What the planner predicts stands beside:
by the machine of --machine, or by the step of one rank and the all-reduce as the ranks measure it.
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
from tfdist.launch import command
from tfdist.launch.bench.scaling_report import Curve, Job, picture
from tfdist.launch.counting import count_cores, count_gpus
from tfdist.launch.flag_values import (
    MOST_RANKS,
    YEAR,
    FlagDefiner,
    UsageError,
    input_file,
    output_file,
    refuse,
    refuse_ignored,
)
from tfdist.runtime.sessions import exit_on_signals, run_in_session
from tfdist.utils.checks import one_line
from tfdist.utils.errors import TfdistError

#: The variable in which the script finds the batch of an update.
BATCH = "TFDIST_BENCH_BATCH"
#: What the line of a rank begins with.
MARK = "tfdist-bench-scaling "
#: Reference models, and rows of an update.
MODELS = {"convnet": 128, "gpt": 16}
_REFERENCE = Path(__file__).with_name("reference_training.py")

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_SCRIPT = _define.string(
    "script", None, "A Python script with its arguments, 'train.py --epochs=1'"
)
_MODEL = _define.enum("model", None, list(MODELS), "A reference model instead")
_RANKS = _define.list("ranks", "1,2", "Numbers of ranks, the smallest to compare with")
_BATCH = _define.integer(
    "batch",
    None,
    "Rows of an update on the fewest ranks, for {batch} [the script's own]",
    lower_bound=1,
    upper_bound=1 << 30,
)
_ENGINE = _define.enum("engine", "auto", ["auto", "horovod", "tensorflow"], "As of tfdist-run")
_HOSTS = _define.string("H", None, "Hosts and their slots, as of tfdist-run [this machine]")
_THREADS = _define.integer(
    "threads",
    None,
    "Threads and cores of each rank, in all jobs [cores / most ranks]",
    lower_bound=1,
    upper_bound=4096,
)
_STEPS = _define.integer(
    "steps", 20, "Steps that are timed in a job", lower_bound=4, upper_bound=1_000_000
)
_WARM_UP = _define.integer(
    "warm_up", 5, "Steps that come before", lower_bound=1, upper_bound=1_000_000
)
_ROUNDS = _define.integer("rounds", 3, "Jobs of each kind", lower_bound=1, upper_bound=1000)
_MACHINE = _define.string("machine", None, "A file of tfdist-plan calibrate, for the prediction")
_JSON = _define.string("json", None, "A file for the findings")
_PICTURE = _define.string("picture", None, "Draw the curves into this file (.png, .svg, .pdf)")
_TIMEOUT = _define.float(
    "timeout", 600.0, "Seconds that a job may take", lower_bound=1.0, upper_bound=YEAR
)

#: The line of a rank; before it tfdist-run writes which rank it is.
_LINE = re.compile(rf"^(?:\[[^\]]*\] )?{MARK}(\{{.*\}})$", re.MULTILINE)
_ERROR = re.compile(r"(?:\[[^\]]*\] )?[\w.]*(?:Error|Exception)\b.*|tfdist-run: .*")
#: By how much the rows of a step may differ from what they should be: the last batch of an epoch may be
#: a smaller one.
_ROWS_OFF = 0.1


class ScalingError(TfdistError):
    """The script cannot be measured, or has failed: one line says why."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a rank is told.

    Attributes:
        steps: How many are timed.
        warm_up: How many come before.
        batch: Rows of an update, for the script; None if it has its own.
        machine: A calibrated machine, as JSON; None: `flops`, and the link as it is measured.
        flops: FLOP/s that one rank was found to reach; None: this job finds it.
        cores: How many of this machine's each rank computes on; None for all.
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
        """Whether ranks compute elsewhere than on this machine's cores."""
        return bool(_HOSTS.value or count_gpus())

    def crowded(self) -> frozenset[int]:
        """Which numbers of ranks have more threads than there are cores."""
        if self.has_devices():
            return frozenset()
        return frozenset(each for each in self.ranks if each * self.threads > count_cores())


def _check(_: list[str]) -> _Run:
    if (_SCRIPT.value is None) == (_MODEL.value is None):
        raise UsageError(
            "Say what to train: --script=train.py, or --model=convnet|gpt. Received: "
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
            "--script has {batch}, and nothing says how many rows. Received: no --batch. Give --batch=64."
        )
    if _HOSTS.value is not None:
        refuse_ignored(_VALUES, (_THREADS,), "is for ranks of this machine", "-H")
    threads = _THREADS.value or max(count_cores() // max(ranks), 1)
    return _Run(words, ranks, batch, threads, _machine())


def _numbers(texts: Sequence[str]) -> list[int]:
    try:
        found = sorted({int(text) for text in texts})
    except ValueError:
        found = []
    if len(found) < 2 or not 1 <= found[0] <= found[-1] <= MOST_RANKS:
        raise refuse("ranks", ",".join(texts), "two or more numbers of ranks, as 1,2,4")
    return found


def _words(script: str) -> list[str]:
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--script: {error}. Received: {script!r}.") from None
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
        raise UsageError(f"--machine: {error}") from None


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
        raise UsageError(f"The findings cannot be written: {error}") from None
    return 0


def _measure(run: _Run) -> list[Curve]:
    """The curves of all rounds."""
    base = run.ranks[0]
    strong: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    weak: dict[int, list[Job]] = {ranks: [] for ranks in run.ranks}
    takes_batch, flops = run.batch is not None, None
    for number in range(_ROUNDS.value):
        # What the machine does slower and slower is not to look like a cost of ranks.
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
            "--batch: a step has as many rows as without it, so only strong scaling is shown. The script "
            "takes the batch from {batch} among its arguments or from TFDIST_BENCH_BATCH.",
        )
    crowded = run.crowded()
    curves = [_named(Curve(False, strong, crowded))]
    if takes_batch and not curves[0].weak:
        curves.append(Curve(True, weak, crowded))
    return curves


def _is_near(one: float, other: float) -> bool:
    return bool(other) and abs(one / other - 1) < _ROWS_OFF


def _named(curve: Curve) -> Curve:
    """The curve by what its steps had of rows: a script may give each rank a batch of its own.

    Raises:
        ScalingError: The rows are neither the same on all numbers of ranks nor the same of each rank.
    """
    base, one = curve.base, curve.rows(curve.base)
    if all(_is_near(curve.rows(n), one) or not one for n in curve.jobs):
        return curve
    if all(_is_near(curve.rows(n), one * n / base) for n in curve.jobs):
        command.say(
            "tfdist-bench",
            "The script gives each rank as many rows on any number of ranks: this is weak scaling.",
        )
        return dataclasses.replace(curve, weak=True)
    rows = ", ".join(f"{curve.rows(n)} on {n} ranks" for n in curve.jobs)
    raise ScalingError(
        "Steps cannot be compared: their rows must be the same on all numbers of ranks, or as many times "
        f"more as there are ranks. Received: {rows}."
    )


def _job(run: _Run, ranks: int, batch: int | None, flops: float | None) -> Job:
    """Runs the script on so many ranks.

    Raises:
        ScalingError: It failed, or has too few steps of `fit`.
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
    words = [sys.executable, "-m", "tfdist.launch.run", f"-np={ranks}", *hosts,
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
            f"{ranks} ranks took longer than --timeout={_TIMEOUT.value:g} seconds."
        ) from None
    found = [json.loads(text) for text in _LINE.findall(done.stdout)]
    if len(found) == ranks:
        slowest = max(found, key=lambda each: each["seconds"])
        known = {field.name for field in dataclasses.fields(Job)}
        return Job(**{name: slowest[name] for name in known & slowest.keys()})
    errors = [line for line in done.stdout.splitlines() if _ERROR.match(line)]
    if done.returncode:
        said = f": {one_line(errors[0])}" if errors else "."
        raise ScalingError(f"{ranks} ranks: {script[0]} ended with code {done.returncode}{said}")
    raise ScalingError(
        f"{ranks} ranks: {script[0]} ended before {_WARM_UP.value} + {_STEPS.value} steps of a Keras "
        "`fit` were timed, the last batch of each epoch aside. Train more epochs, or lower --steps and --warm_up."
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
    "of strong and weak scaling beside what the planner predicts.",
    check=_check,
)


if __name__ == "__main__":
    PROGRAM.run()
