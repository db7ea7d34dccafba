"""Every flag with every bad value: one line that names the flag and shows the value, and code 2."""

import collections
import dataclasses
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl.testing import flagsaver

from tests.values.command_lines import (
    COMPANIONS,
    LEGAL,
    BadLine,
    bad_lines,
    base_of,
    programs,
    random_lines,
)
from tfdist.launch.flags.command import Program, UsageError
from tfdist.utils.checks import shown

pytestmark = pytest.mark.usefixtures("no_old_garbage")

_MOST_SECONDS = 2.0
_RANDOM_TEXTS = 12


@dataclasses.dataclass(frozen=True)
class Outcome:
    line: BadLine
    error: BaseException | None
    seconds: float


def _parse(program: Program, arguments) -> tuple[BaseException | None, float]:
    """How a program answers to a command line, before it does anything."""
    saved = flagsaver.save_flag_values(program.values)
    begin, error = time.process_time(), None
    try:
        program.parse(list(arguments))
    except BaseException as caught:
        error = caught
    finally:
        flagsaver.restore_flag_values(saved, program.values)
    return error, time.process_time() - begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where command lines are tried: it holds what some of them name."""
    path = tmp_path_factory.mktemp("flags")
    (path / "folder").mkdir()
    (path / "file").write_text("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name in list(os.environ):
            if name.startswith(("SLURM_", "HOROVOD_")):
                patch.delenv(name)
        yield path


@pytest.fixture(scope="module")
def outcomes(folder) -> list[Outcome]:
    known = programs()
    return [Outcome(line, *_parse(known[line.program], line.arguments)) for line in bad_lines()]


def _base_error(line: BadLine) -> str:
    """What a command line is answered without the flag: where it lacks something of the machine."""
    before, behind = base_of(line.program, line.flag)
    return str(_parse(programs()[line.program], [*before, *behind])[0])


def _wrong_with(outcome: Outcome) -> str:
    """What is wrong with the answer to a bad value, or ""."""
    line, error = outcome.line, outcome.error
    if outcome.seconds > _MOST_SECONDS:
        return f"it took {outcome.seconds:.1f} s"
    if error is None or str(error) == _base_error(line):
        return "" if line.is_legal else "it is taken"
    if not isinstance(error, UsageError):
        return f"{type(error).__name__}: {error}"
    text = " ".join(str(error).split())
    # What is long is cut, what cannot be printed is shown as Python writes it.
    some = " ".join(line.value[:40].split())
    if f"-{line.flag}" not in text or (some not in text and shown(line.value)[1:20] not in text):
        return f"the message is {text[:300]!r}"
    return ""


@pytest.mark.parametrize("name", programs())
def test_bad_values_are_refused_by_name(outcomes, name):
    wrong = [
        f"{outcome.line.flag}={shown(outcome.line.value)}: {what}"
        for outcome in outcomes
        if outcome.line.program == name and (what := _wrong_with(outcome))
    ]
    assert not wrong, "\n".join(wrong)


def test_at_least_a_thousand_values_are_refused(outcomes):
    refused = collections.Counter(o.line.program for o in outcomes if o.error is not None)
    print(dict(refused))
    assert refused.total() >= 1000, refused


def test_random_texts_are_taken_or_refused_in_one_line(folder):
    seed = random.SystemRandom().randrange(2**32)
    known = programs()
    for line in random_lines(_RANDOM_TEXTS, seed):
        error, seconds = _parse(known[line.program], line.arguments)
        told = f"seed {seed}: {line.arguments}: {error!r}"
        assert error is None or isinstance(error, UsageError), told
        assert seconds < _MOST_SECONDS, told


def test_the_tables_name_flags_and_values_that_are_there(outcomes):
    known = {(name, flag) for name, program in programs().items() for flag in program.values}
    assert COMPANIONS.keys() <= known
    assert LEGAL.keys() <= known
    taken = {
        (outcome.line.program, outcome.line.flag, outcome.line.value_name)
        for outcome in outcomes
        if outcome.error is None or str(outcome.error) == _base_error(outcome.line)
    }
    for (program, flag), names in LEGAL.items():
        for name in names:
            assert (program, flag, name) in taken, f"{program} --{flag}: {name}"


def test_processes_end_with_one_line_and_code_2(folder, tmp_path):
    """A sample, each as a user would start it: nothing slow is imported before a value is refused."""
    for slow in ("horovod", "keras", "keras_hub", "tensorflow"):
        (tmp_path / f"{slow}.py").write_text("raise RuntimeError('It is imported.')")
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    by_program: dict[str, list[BadLine]] = {}
    for line in bad_lines():
        if not line.is_legal and "\0" not in line.value and len(line.value) < 1000:
            by_program.setdefault(line.program, []).append(line)
    for lines in by_program.values():
        line = draw.choice(lines)
        script, *arguments = line.arguments
        command = [str(Path(sys.executable).parent / script), *line.program.split()[1:], *arguments]
        before = _seconds_of_children()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        seconds = _seconds_of_children() - before
        told = f"seed {seed}: {command}: {done.returncode} {done.stderr} in {seconds:.1f} s"
        assert done.returncode == 2, told
        assert done.stderr.count("\n") == 1, told
        assert done.stdout == "", told
        assert seconds < _MOST_SECONDS, told


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
