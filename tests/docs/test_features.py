"""The table of features in examples/README.md: each name can be imported, each script is there, each flag is one of its program."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_, _, _TABLE = (EXAMPLES / "README.md").read_text().partition("\n## Features\n")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _TABLE.partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| Feature")
]
SCRIPTS = {path.name for path in EXAMPLES.glob("*.py")}


def quoted(column: int) -> list[str]:
    return sorted({each for row in ROWS for each in re.findall(r"`([^`]+)`", row[column])})


@pytest.mark.parametrize("name", quoted(1))
def test_names(name):
    module, parts = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
    assert functools.reduce(getattr, parts, found) is not None


@functools.cache
def help_of(program: str) -> str:
    path = Path(sys.executable).with_name(program)
    words = [str(path), "--helpfull"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("words", [each for each in quoted(2) if each.startswith("tfdist-")])
def test_flags(words):
    program, *rest = words.split()
    if program == "tfdist-bench":
        assert re.search(rf"\b{rest[0]}\b", help_of(program))
        rest = []
    for flag in rest:
        assert re.search(rf"^\s*{flag}\b", help_of(program), re.MULTILINE), flag


def test_every_script_is_named():
    named = {each for each in quoted(2) if each.endswith(".py")}
    assert named <= SCRIPTS
    assert SCRIPTS - named == {"keras_io_guide.py", "make_preset.py"}
    assert len(ROWS) > 30


def test_links():
    for row in ROWS:
        page = re.fullmatch(r"\[.+\]\(([\w./]+\.md)\)", row[3])
        assert page and (EXAMPLES / page[1]).exists(), row
