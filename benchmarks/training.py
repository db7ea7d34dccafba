"""`python -m benchmarks.training`: the same GPT and ConvNet on tfdist and on others, and the ratios.

    make peers                                  # makes an environment for each of the others
    python -m benchmarks.training --json=training.json --document=docs/performance.md
    python -m benchmarks.training --only=gpt-ddp,gpt-fsdp --rounds=5
    python -m benchmarks.training --against=HEAD~1      # the checkout and a commit, alone: what a change did

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
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from benchmarks import against, commits, findings
from benchmarks.comparisons import COMPARISONS, ROWS, SIZES, Comparison, Job
from benchmarks.environments import versions
from benchmarks.findings import Finding, Side
from benchmarks.job_variables import ONEDNN
from benchmarks.jobs import Block, JobError, RunningJob, interpreter
from benchmarks.measuring import has_between, write_between
from benchmarks.model_flops import gemm_peak, step_flops
from benchmarks.turns import take_turns
from tfdist.launch.flags import command
from tfdist.launch.flags.values import (
    YEAR,
    FlagDefiner,
    input_file,
    output_file,
    refuse,
    refuse_ignored,
)
from tfdist.launch.signals import exit_on_signals

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_ONLY = _define.list("only", None, "Names of comparisons to run, with commas")
_AGAINST = _define.string("against", None, "A commit: compares this checkout only with it")
_ROUNDS = _define.integer(
    "rounds", None, "The number of turns [9; --against: 15]", lower_bound=1, upper_bound=10_000
)
_STEPS = _define.integer(
    "steps",
    None,
    "The steps of each turn [8; --against: 2 s]",
    lower_bound=1,
    upper_bound=1_000_000,
)
_PEERS = _define.string("peers", ".peers", "The folder of `make peers`")
_SIZES = _define.enum("sizes", "full", list(SIZES), "The sizes of the models")
_ALLOCATOR = _define.string(
    "allocator", None, "A malloc library for all processes, such as libtcmalloc"
)
_JSON = _define.string("json", None, "A file for the findings; it keeps its other findings")
_DOCUMENT = _define.string(
    "document", None, "A document whose tables are updated: docs/performance.md"
)
_PICTURE = _define.string("picture", None, "A file for a picture of the ratios (.png, .svg, .pdf)")
_TIMEOUT = _define.float(
    "timeout",
    300.0,
    "The time-out of a start or a turn, in seconds",
    lower_bound=1.0,
    upper_bound=YEAR,
)

_MARK = "benchmarks.training"


class Against(NamedTuple):
    """What `--against` asks for: the checkout, the hash of the commit, and the names of rows."""

    new: commits.Tree
    commit: str
    names: list[str]


def run(arguments: list[str] | None = None) -> None:
    """Runs the program; its arguments begin with its name."""
    PROGRAM.run(arguments)


def _check(_: list[str]) -> list[Comparison] | Against:
    if _JSON.value is not None:
        output_file("json", _JSON.value)
    if _PICTURE.value is not None:
        output_file("picture", _PICTURE.value, (".png", ".svg", ".pdf"))
    if _ALLOCATOR.value is not None:
        input_file("allocator", _ALLOCATOR.value)  # The loader would warn, and go on without.
    if _DOCUMENT.value is not None:
        _check_document(_DOCUMENT.value)
    return _chosen() if _AGAINST.value is None else _check_against(_AGAINST.value)


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


def _check_against(name: str) -> Against:
    refuse_ignored(
        _VALUES, (_DOCUMENT, _PICTURE), "is for comparisons with others", f"--against={name}"
    )
    names = _names(ROWS, " with --against")
    new = commits.checkout()
    return Against(new, commits.resolve(new.folder, name), names)


def _main(chosen: list[Comparison] | Against) -> int:
    if isinstance(chosen, Against):
        return _compare_trees(chosen)
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
                rounds=_ROUNDS.value or 9,
                steps=_STEPS.value or 8,
                timeout=_TIMEOUT.value,
            )
            found = dataclasses.replace(found, gemm_peak=peaks[threads])
        except JobError as error:
            command.say("benchmarks", f"{comparison.name}: {error}")
            failed = True
            continue
        except KeyboardInterrupt:
            command.say("benchmarks", "Stopped.")
            return 130
        print(found.row(), flush=True)
        failed |= found.is_over
        known[comparison.name] = found
        # After each, so that nothing is lost when it is stopped.
        _keep([known[name] for name in COMPARISONS if name in known])
    return int(failed)


def _compare_trees(chosen: Against) -> int:
    """Measures rows of the checkout and of a commit, and prints and writes what has come out."""
    new, peers = chosen.new, Path(_PEERS.value)
    rounds = _ROUNDS.value or 15
    rows: list[against.Row] = []
    failed = False
    try:
        with exit_on_signals():
            old = commits.tree_of(new, chosen.commit, peers)
            print(f"new: {new.folder}, {new.commit}\nold: {old.folder}, {old.commit}")
            print(against.header(rounds), flush=True)
            for name in chosen.names:
                try:
                    row = against.measure(
                        name,
                        new,
                        old,
                        sizes=_SIZES.value,
                        peers=peers,
                        rounds=rounds,
                        steps=_STEPS.value,
                        timeout=_TIMEOUT.value,
                        variables=_allocator_variables(),
                    )
                except JobError as error:
                    command.say("benchmarks", f"{name}: {error}")
                    failed = True
                    continue
                rows.append(row)
                print(row.line(), flush=True)
                if _JSON.value:  # After each, so that nothing is lost when it is stopped.
                    day = datetime.date.today().isoformat()
                    against.write(Path(_JSON.value), new, old, _machine(), day, rows)
    except KeyboardInterrupt:
        command.say("benchmarks", "Stopped.")
        return 130
    if rows:
        print(against.all_rows(rows).line())
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
    jobs, blocks = take_turns(
        sides, comparison.model, size, peers, rounds=rounds, steps=steps, timeout=timeout
    )
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


def _names(known: Iterable[str], where: str = "") -> list[str]:
    """Those of `--only`, or all that there are."""
    names = list(known) if _ONLY.value is None else _ONLY.value
    for name in names:
        if name not in known:
            raise command.UsageError(
                f"--only{where} must be of {', '.join(known)}. Received: {name!r}."
            )
    return names


def _chosen() -> list[Comparison]:
    chosen = [_with_allocator(COMPARISONS[name]) for name in _names(COMPARISONS)]
    for comparison in chosen:
        for job in (comparison.ours, comparison.theirs):
            try:
                interpreter(job, Path(_PEERS.value))
            except JobError as error:
                raise command.UsageError(str(error)) from None
    return chosen


def _with_allocator(comparison: Comparison) -> Comparison:
    """The comparison with the allocator of `--allocator` on both sides."""
    ours, theirs = (
        dataclasses.replace(job, variables={**job.variables, **_allocator_variables()})
        for job in (comparison.ours, comparison.theirs)
    )
    return dataclasses.replace(comparison, ours=ours, theirs=theirs)


def _allocator_variables() -> dict[str, str]:
    if _ALLOCATOR.value is None:
        return {}
    path = Path(_ALLOCATOR.value).absolute()
    # oneDNN's pool in TensorFlow would ask for large blocks only, and keep them.
    return {"LD_PRELOAD": str(path), "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def _known() -> dict[str, Finding]:
    if _JSON.value is None:
        return {}
    try:
        return findings.read(Path(_JSON.value))
    except (OSError, ValueError) as error:
        raise command.UsageError(f"The file of --json is not usable: {error}") from None


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
    usage="python -m benchmarks.training [flags]",
    summary="Trains the same models on tfdist, tf_keras, PyTorch and Keras on JAX, in turn, and compares the "
    f"times of a step. Comparisons: {', '.join(COMPARISONS)}.",
    check=_check,
)


if __name__ == "__main__":
    run()
