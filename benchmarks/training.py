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
from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import YEAR, input_file, output_file, refuse
from tfdist.launch.signals import exit_on_signals

_MARK = "benchmarks.training"


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """The options of the program; see the flags of the same names."""

    only: tuple[str, ...] | None = option(None, "Names of comparisons to run, with commas")
    against: str | None = option(None, "A commit: compares this checkout only with it")
    rounds: int | None = option(
        None, "The number of turns [9; --against: 15]", least=1, most=10_000
    )
    steps: int | None = option(
        None, "The steps of each turn [8; --against: 2 s]", least=1, most=1_000_000
    )
    peers: str = option(".peers", "The folder of `make peers`")
    sizes: str = option("full", "The sizes of the models", choices=SIZES)
    allocator: str | None = option(None, "A malloc library for all processes, such as libtcmalloc")
    json: str | None = option(None, "A file for the findings; it keeps its other findings")
    document: str | None = option(None, "A document whose tables are updated: docs/performance.md")
    picture: str | None = option(None, "A file for a picture of the ratios (.png, .svg, .pdf)")
    timeout: float = option(
        300.0, "The time-out of a start or a turn, in seconds", least=1.0, most=YEAR
    )


_FLAGS = define_flags(TrainingOptions)


class Against(NamedTuple):
    """What `--against` asks for: the checkout, the hash of the commit, and the names of rows."""

    new: commits.Tree
    commit: str
    names: list[str]


def run(arguments: list[str] | None = None) -> None:
    """Runs the program; its arguments begin with its name."""
    PROGRAM.run(arguments)


def _check(_: list[str]) -> list[Comparison] | Against:
    options = _FLAGS.read()
    if options.json is not None:
        output_file("json", options.json)
    if options.picture is not None:
        output_file("picture", options.picture, (".png", ".svg", ".pdf"))
    if options.allocator is not None:
        input_file("allocator", options.allocator)  # The loader would warn, and go on without.
    if options.document is not None:
        _check_document(options.document)
    return _chosen() if options.against is None else _check_against(options.against)


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
    why = "is for comparisons with others"
    refuse_ignored(_FLAGS.read(), ["document", "picture"], why, f"--against={name}")
    names = _names(ROWS, " with --against")
    new = commits.checkout()
    return Against(new, commits.resolve(new.folder, name), names)


def _main(chosen: list[Comparison] | Against) -> int:
    options = _FLAGS.read()
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
                sizes=options.sizes,
                peers=Path(options.peers),
                rounds=options.rounds or 9,
                steps=options.steps or 8,
                timeout=options.timeout,
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
    options = _FLAGS.read()
    new, peers = chosen.new, Path(options.peers)
    rounds = options.rounds or 15
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
                        sizes=options.sizes,
                        peers=peers,
                        rounds=rounds,
                        steps=options.steps,
                        timeout=options.timeout,
                        variables=_allocator_variables(),
                    )
                except JobError as error:
                    command.say("benchmarks", f"{name}: {error}")
                    failed = True
                    continue
                rows.append(row)
                print(row.line(), flush=True)
                if options.json:  # After each, so that nothing is lost when it is stopped.
                    day = datetime.date.today().isoformat()
                    against.write(Path(options.json), new, old, _machine(), day, rows)
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
    options = _FLAGS.read()
    names = list(known if options.only is None else options.only)
    for name in names:
        if name not in known:
            raise command.UsageError(
                f"--only{where} must be of {', '.join(known)}. Received: {name!r}."
            )
    return names


def _chosen() -> list[Comparison]:
    options = _FLAGS.read()
    chosen = [_with_allocator(COMPARISONS[name]) for name in _names(COMPARISONS)]
    for comparison in chosen:
        for job in (comparison.ours, comparison.theirs):
            try:
                interpreter(job, Path(options.peers))
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
    options = _FLAGS.read()
    if options.allocator is None:
        return {}
    path = Path(options.allocator).absolute()
    # oneDNN's pool in TensorFlow would ask for large blocks only, and keep them.
    return {"LD_PRELOAD": str(path), "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def _known() -> dict[str, Finding]:
    options = _FLAGS.read()
    if options.json is None:
        return {}
    try:
        return findings.read(Path(options.json))
    except (OSError, ValueError) as error:
        raise command.UsageError(f"The file of --json is not usable: {error}") from None


def _keep(found: list[Finding]) -> None:
    options = _FLAGS.read()
    try:
        if options.json:
            findings.write(Path(options.json), found)
        if options.document:
            write_between(options.document, _mark(), findings.table(found))
        if options.picture:
            findings.picture(Path(options.picture), found)
    except (OSError, ValueError, ImportError) as error:
        raise command.UsageError(f"The findings cannot be written: {error}") from None


def _mark() -> str:
    """The document's mark of what was measured with these sizes and this allocator."""
    options = _FLAGS.read()
    parts = [_MARK]
    if options.sizes != "full":
        parts.append(options.sizes)
    if options.allocator is not None:
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
    _FLAGS.values,
    usage="python -m benchmarks.training [flags]",
    summary="Trains the same models on tfdist, tf_keras, PyTorch and Keras on JAX, in turn, and compares the "
    f"times of a step. Comparisons: {', '.join(name for name in COMPARISONS if not name.endswith('-xla'))}; "
    "and with -xla, such as gpt-data-xla, compiled steps.",
    check=_check,
)


if __name__ == "__main__":
    run()
