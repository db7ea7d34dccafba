"""How the documents' commands are run: as they stand, but on two ranks and with small sizes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.environments import ENVIRONMENTS, MADE
from tests.docs.blocks import ROOT
from tfdist.addons.planner import machine
from tfdist.addons.planner.calibration import write_machine

__all__ = ["Plan", "check_flags", "plan", "run", "sandbox"]

_BIN = Path(sys.executable).parent
#: Words behind which a command begins that another one starts.
_STARTS_ANOTHER = ("tfdist-run", "tfdist-launch")
#: Added to a training program, for one epoch of a small model.
_SMALL = {
    "gpt": "--dataset=text:small.txt --epochs=1 --layers=2 --width=16 --heads=2 --seq_length=16",
    "convnet": "--epochs=1",
}
#: What only has its flags checked, as it takes minutes: a build, environments and benchmarks.
_LONG = ("tfdist-install-horovod", "tfdist-bench", "tfdist-finetune")
#: Checks a command line as the program does, and does nothing else.
_PARSE = """
import importlib, sys
module, name, key, *line = sys.argv[1:]
found = getattr(importlib.import_module(module), name)
(found[key] if key else found).parse(line)
"""
#: Where a program's flags are: module, name, and whether its first word chooses a part of it.
_PROGRAMS = {
    "tfdist-run": ("tfdist.launch.run.main", "PROGRAM", False),
    "tfdist-train": ("tfdist.launch.train.main", "PROGRAM", False),
    "tfdist-finetune": ("tfdist.launch.finetune.main", "PROGRAM", False),
    "tfdist-install-horovod": ("tfdist.launch.install_horovod.main", "PROGRAM", False),
    "tfdist-doctor": ("tfdist.launch.doctor.main", "PROGRAM", False),
    "tfdist-schedule": ("tfdist.launch.schedule", "PROGRAM", False),
    "tfdist-plan": ("tfdist.launch.plan.main", "PROGRAMS", True),
    "tfdist-launch": ("tfdist.launch.submit.main", "PROGRAMS", True),
    "tfdist-bench": ("tfdist.launch.bench.main", "PROGRAMS", True),
}


@dataclasses.dataclass
class Plan:
    """What is done for a command.

    Attributes:
        words: What is run; without words there is nothing but flags to check.
        environment: Variables that stand before it.
        at_root: Whether it runs at the root of the checkout, which it then only reads.
        is_long: Whether it takes more than some seconds.
    """

    words: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    at_root: bool = False
    is_long: bool = False


def sandbox(folder: Path) -> Path:
    """A folder with what documents' commands find beside them: a script, a text, hosts, examples."""
    shutil.copy(Path(__file__).with_name("train.py"), folder / "train.py")
    (folder / "small.txt").write_text("What the model of this test reads, again and again. " * 20)
    for name in ("gpt2-small", "llama3", "out"):  # As far as the flags are checked.
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "conversations.jsonl").write_text("{}\n")
    (folder / "runs.jsonl").write_text('{"ranks": 1, "seconds": 2}\n{"ranks": 2, "seconds": 1}\n')
    write_machine(folder / "machine.json", machine("t4"))
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ENVIRONMENTS:  # As `make peers` leaves them, for the check of flags alone.
        (folder / ".peers" / name).mkdir(parents=True)
        (folder / ".peers" / name / MADE).touch()
    return folder


def plan(words: list[str]) -> Plan:
    """How a command is run here.

    Raises:
        ValueError: There is no way to run it; its block says why in a comment.
    """
    words = list(words)
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = words[0].removeprefix(".venv/bin/")
    make = _MAKES.get(program)
    if make is None:
        raise ValueError(f"There is no way here to run {' '.join(words)!r}: say how, or why not.")
    found = make([program, *words[1:]])
    found.environment |= variables
    found.is_long |= bool(variables)
    return found


def run(found: Plan, folder: Path, timeout: float) -> str:
    """Runs a command and returns what it printed.

    Raises:
        AssertionError: It failed.
    """
    # Programs start others by name, which are then those of this environment.
    path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = [word.replace("/data/", f"{folder}/") for word in found.words]
    done = subprocess.run(
        words,
        cwd=ROOT if found.at_root else folder,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", **found.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_flags(words: list[str], folder: Path) -> None:
    """Has the programs of tfdist in a command check their flags, also those that another starts.

    Raises:
        AssertionError: A flag or a value is wrong.
    """
    while words and ("=" in words[0] and not words[0].startswith("-")):
        words = words[1:]
    if not words:
        return
    program = words[0].removeprefix(".venv/bin/")
    if program in _PROGRAMS:
        run(_parsing([program, *words[1:]]), folder, timeout=60)
    if program in _STARTS_ANOTHER and "--" in words:
        check_flags(words[words.index("--") + 1 :], folder)


def _parsing(words: list[str]) -> Plan:
    module, name, has_parts = _PROGRAMS[words[0]]
    key, *line = words[1:] if has_parts else ["", *words[1:]]
    if key.startswith("-"):  # The part that needs no word.
        key, line = "layout", words[1:]
    if words[:2] == ["tfdist-finetune", "chat"]:
        name, line = "TALK", words[2:]
    return Plan([sys.executable, "-c", _PARSE, module, name, key, words[0], *line])


def _make(words: list[str]) -> Plan:
    # Prints what it would do, which tells that the target is there.
    return Plan(["make", "-n", *words[1:]], at_root=True)


def _pip(words: list[str]) -> Plan:
    # Says what it would install, from nothing but this folder; `tests/packaging` installs it.
    only = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    return Plan(
        [sys.executable, "-m", "pip", words[1], *only, *words[2:]], at_root=True, is_long=True
    )


def _python(words: list[str]) -> Plan:
    if words[1:3] == ["-m", "pytest"]:
        # The tests run by themselves: here it counts that the command finds some.
        return Plan(
            [sys.executable, *words[1:], "--collect-only", "-q"], at_root=True, is_long=True
        )
    if words[1] == "-m" and words[2].startswith("benchmarks."):
        # A benchmark takes minutes: its flags are checked.
        code = [_PARSE, words[2], "PROGRAM", "", *words[2:]]
        return Plan([sys.executable, "-c", *code], environment={"PYTHONPATH": str(ROOT)})
    return Plan([sys.executable, *words[1:]], is_long=words[1].startswith("examples/"))


def _train(words: list[str]) -> Plan:
    given = [word.removeprefix("--model=") for word in words if word.startswith("--model=")]
    small = _SMALL[given[0] if given else "convnet"]
    return Plan([str(_BIN / words[0]), *words[1:], *small.split()], is_long=True)


def _run(words: list[str]) -> Plan:
    """On two ranks, whatever the number in the document."""
    at = words.index("-np")
    words[at + 1] = "2"
    # tfdist-run wants `--` before the command, horovodrun has flags with one value each.
    end = words.index("--") + 1 if "--" in words else at + 2
    inner = plan(words[end:])
    # One start of ranks is enough for the quick tests: the one without flags.
    is_long = inner.is_long or words[:end] != ["tfdist-run", "-np", "2", "--"]
    return Plan([str(_BIN / words[0]), *words[1:end], *inner.words], is_long=is_long)


def _doctor(words: list[str]) -> Plan:
    # A problem of the machine that tests run on is none of the document's; imports take seconds.
    script = 'program=$1; shift; "$program" --noimports "$@" || test $? -eq 1'
    return Plan(["sh", "-c", script, "-", str(_BIN / words[0]), *words[1:]])


def _plan(words: list[str]) -> Plan:
    # To calibrate takes a minute.
    return _parsing(words) if words[1] == "calibrate" else _as_it_stands(words)


def _as_it_stands(words: list[str]) -> Plan:
    return Plan([str(_BIN / words[0]), *words[1:]])


#: By program.
_MAKES: dict[str, Callable[[list[str]], Plan]] = {
    "horovodrun": _run,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "tfdist-doctor": _doctor,
    "tfdist-launch": _as_it_stands,
    "tfdist-plan": _plan,
    "tfdist-run": _run,
    "tfdist-schedule": _as_it_stands,
    "tfdist-train": _train,
    **dict.fromkeys(_LONG, _parsing),
}
