"""`tfdist-bench training`: the same GPT and ConvNet on tfdist and on others, and the ratios.

    make peers                                  # makes an environment for each of the others
    tfdist-bench training --json=training.json --document=docs/performance.md
    tfdist-bench training --only=gpt-ddp,gpt-fsdp --rounds=5

Both jobs of a comparison live at once and take turns: one trains a block of steps while the other
waits, so what else the machine does falls on both. The ratio is that of the medians of a round's two
blocks; which comes first changes from round to round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
from pathlib import Path

from absl import flags

from tfdist.benchmarks import findings
from tfdist.benchmarks.comparisons import COMPARISONS, SIZES, Comparison, Job
from tfdist.benchmarks.environments import versions
from tfdist.benchmarks.findings import Finding, Side
from tfdist.benchmarks.job_variables import ONEDNN
from tfdist.benchmarks.jobs import Block, JobError, RunningJob, interpreter
from tfdist.benchmarks.measuring import has_between, write_between
from tfdist.benchmarks.model_flops import gemm_peak, step_flops
from tfdist.launch import command
from tfdist.launch.flag_values import YEAR, FlagDefiner, input_file, output_file, refuse

__all__ = ["PROGRAM", "compare", "run"]

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_ONLY = _define.list("only", None, "Some comparisons, by name")
_ROUNDS = _define.integer("rounds", 9, "Turns", lower_bound=1, upper_bound=10_000)
_STEPS = _define.integer("steps", 8, "Of each turn", lower_bound=1, upper_bound=1_000_000)
_PEERS = _define.string("peers", ".peers", "What `make peers` made")
_SIZES = _define.enum("sizes", "full", list(SIZES), "Of the models")
_ALLOCATOR = _define.string("allocator", None, "A library of malloc that all take: libtcmalloc")
_JSON = _define.string("json", None, "A file for the findings; others in it stay")
_DOCUMENT = _define.string("document", None, "Whose tables to renew: docs/performance.md")
_PICTURE = _define.string("picture", None, "Draw the ratios into this file (.png, .svg, .pdf)")
_TIMEOUT = _define.float(
    "timeout",
    300.0,
    "Seconds that a start or a turn may take",
    lower_bound=1.0,
    upper_bound=YEAR,
)

_MARK = "tfdist-bench training"
_WARM_UP = 3


def run(arguments: list[str] | None = None) -> None:
    """Runs the program; its arguments begin with its name."""
    PROGRAM.run(arguments)


def _check(_: list[str]) -> list[Comparison]:
    if _JSON.value is not None:
        output_file("json", _JSON.value)
    if _PICTURE.value is not None:
        output_file("picture", _PICTURE.value, (".png", ".svg", ".pdf"))
    if _ALLOCATOR.value is not None:
        input_file("allocator", _ALLOCATOR.value)  # The loader would warn, and go on without.
    if _DOCUMENT.value is not None:
        _check_document(_DOCUMENT.value)
    return _chosen()


def _check_document(path: str) -> None:
    """Refuses a document without the place that the table goes to."""
    marks = f"a document that is there, with the lines <!-- {_mark()} --> and <!-- end -->"
    if not os.path.exists(path):
        raise refuse("document", path, marks)
    input_file("document", path)
    output_file("document", path)
    try:
        has_place = has_between(path, _mark())
    except UnicodeDecodeError:
        has_place = False
    if not has_place:
        raise refuse("document", path, marks)


def _main(chosen: list[Comparison]) -> int:
    known = _known()
    failed = False
    peaks: dict[int, float] = {}  # By threads.
    for comparison in chosen:
        try:
            threads = comparison.ours.ranks * comparison.ours.threads
            if threads not in peaks:
                peaks[threads] = gemm_peak(threads)
            found = compare(
                comparison,
                sizes=_SIZES.value,
                peers=Path(_PEERS.value),
                rounds=_ROUNDS.value,
                steps=_STEPS.value,
                timeout=_TIMEOUT.value,
            )
            found = dataclasses.replace(found, gemm_peak=peaks[threads])
        except JobError as error:
            command.say("tfdist-bench", f"{comparison.name}: {error}")
            failed = True
            continue
        except KeyboardInterrupt:
            command.say("tfdist-bench", "Stopped.")
            return 130
        print(found.row(), flush=True)
        failed |= found.is_over
        known[comparison.name] = found
        # After each, so that nothing is lost when it is stopped.
        _keep([known[name] for name in COMPARISONS if name in known])
    return int(failed)


def compare(
    comparison: Comparison, *, sizes: str, peers: Path, rounds: int, steps: int, timeout: float
) -> Finding:
    """Measures one comparison.

    Args:
        comparison: Which.
        sizes: Which of `SIZES`.
        peers: The folder of the environments that `make peers` makes.
        rounds: How many turns.
        steps: How many steps a turn has.
        timeout: How long a start or a turn may take, in seconds.

    Raises:
        JobError: A job failed, their models differ in size, or one does not learn.
    """
    size = SIZES[sizes][comparison.model]
    sides = (comparison.ours, comparison.theirs)
    blocks: tuple[list[Block], list[Block]] = ([], [])
    with contextlib.ExitStack() as stack:
        # One after the other: a start takes all cores.
        jobs = []
        for job, own in zip(sides, blocks, strict=True):
            running = RunningJob(job, comparison.model, size, peers, timeout)
            jobs.append(stack.enter_context(running))
            own.append(running.block(_WARM_UP))
        if jobs[0].parameters != jobs[1].parameters:
            raise JobError(
                f"The models differ: {sides[0].title} has {jobs[0].parameters:,} parameters, "
                f"{sides[1].title} {jobs[1].parameters:,}."
            )
        for number in range(rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                blocks[index].append(jobs[index].block(steps))
    ours, theirs = (_side(*each, peers) for each in zip(sides, jobs, blocks, strict=True))
    return Finding(
        comparison.name,
        ours,
        theirs,
        limit=comparison.limit,
        parameters=jobs[0].parameters,
        machine=_machine(),
        day=datetime.date.today().isoformat(),
        flops=step_flops(comparison, size),
    )


def _side(job: Job, running: RunningJob, blocks: list[Block], peers: Path) -> Side:
    first, *turns = blocks
    last = turns[-1]
    if first.loss is not None and last.loss is not None and not last.loss < first.loss:
        raise JobError(
            f"{job.title} does not learn: its loss was {first.loss:.4f} at first, "
            f"{last.loss:.4f} at last."
        )
    return Side(
        title=job.title,
        versions=versions(job.environment, peers),
        seconds=[block.seconds for block in turns],
        processor=[block.processor for block in turns],
        imported=running.imported,
        peak=last.peak,
        first_loss=first.loss,
        last_loss=last.loss,
        trained=running.trained,
    )


def _chosen() -> list[Comparison]:
    names = list(COMPARISONS) if _ONLY.value is None else _ONLY.value
    for name in names:
        if name not in COMPARISONS:
            raise command.UsageError(f"--only is of {', '.join(COMPARISONS)}. Received: {name!r}.")
    chosen = [_with_allocator(COMPARISONS[name]) for name in names]
    for comparison in chosen:
        for job in (comparison.ours, comparison.theirs):
            try:
                interpreter(job, Path(_PEERS.value))
            except JobError as error:
                raise command.UsageError(str(error)) from None
    return chosen


def _with_allocator(comparison: Comparison) -> Comparison:
    """The comparison with the allocator of `--allocator` on both sides."""
    if _ALLOCATOR.value is None:
        return comparison
    path = Path(_ALLOCATOR.value).absolute()
    # oneDNN's pool in TensorFlow would ask for large blocks only, and keep them.
    variables = {"LD_PRELOAD": str(path), "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
    ours, theirs = (
        dataclasses.replace(job, variables={**job.variables, **variables})
        for job in (comparison.ours, comparison.theirs)
    )
    return dataclasses.replace(comparison, ours=ours, theirs=theirs)


def _known() -> dict[str, Finding]:
    if _JSON.value is None:
        return {}
    try:
        return findings.read(Path(_JSON.value))
    except (OSError, ValueError) as error:
        raise command.UsageError(f"--json: {error}") from None


def _keep(found: list[Finding]) -> None:
    try:
        if _JSON.value:
            findings.write(Path(_JSON.value), found)
        if _DOCUMENT.value:
            write_between(_DOCUMENT.value, _mark(), findings.table(found))
        if _PICTURE.value:
            findings.picture(Path(_PICTURE.value), found)
    except (OSError, ValueError, ImportError) as error:
        raise command.UsageError(f"The findings cannot be written: {error}") from None


def _mark() -> str:
    """The document's mark of what was measured with these sizes and this allocator."""
    parts = [_MARK]
    if _SIZES.value != "full":
        parts.append(_SIZES.value)
    if _ALLOCATOR.value is not None:
        parts.append("allocator")
    return ", ".join(parts)


def _machine() -> str:
    name = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        models = [line for line in file if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    onednn = f", {ONEDNN}={os.environ[ONEDNN]}" if ONEDNN in os.environ else ""
    return f"{os.cpu_count()} cores of {name}, {platform.system()}{onednn}"


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-bench training [flags]",
    summary="Trains the same models on tfdist, tf_keras, PyTorch and Keras on JAX, in turn, and compares the "
    f"times of a step. Comparisons: {', '.join(COMPARISONS)}.",
    check=_check,
)


if __name__ == "__main__":
    run()
