"""The walks of docs/code_tour.md: each place is a file that defines the function or class."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PLACE = re.compile(r"`([\w/]+\.py):(\w+(?:\.\w+)*)`")
_STEP = re.compile(r"^\d+\. (.*(?:\n +.*)*)", re.MULTILINE)


def walks() -> dict[str, list[str]]:
    """The steps of each walk, by its heading."""
    text = (ROOT / "docs" / "code_tour.md").read_text()
    found = re.findall(r"^## (The walk of .*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {heading: _STEP.findall(body) for heading, body in found}


def places() -> list[tuple[str, str]]:
    """The files and names of the tour, those of its steps and all others."""
    return sorted(set(_PLACE.findall((ROOT / "docs" / "code_tour.md").read_text())))


def definition(tree: ast.AST, name: str) -> ast.AST | None:
    """The definition of a function or class at the top of a module, or of a method of a class."""
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [n for n in getattr(tree, "body", ()) if isinstance(n, kinds) and n.name == part]
        if not found:
            return None
        tree = found[-1]
    return tree


@pytest.mark.parametrize(("file", "name"), places())
def test_a_place_exists(file, name):
    path = ROOT / file
    assert path.exists(), file
    assert definition(ast.parse(path.read_text()), name) is not None, f"{file} has no {name}"


def test_each_step_of_the_six_walks_has_a_place():
    found = walks()
    assert len(found) == 6
    for heading, steps in found.items():
        assert len(steps) >= 8, heading
        for step in steps:
            assert _PLACE.match(step), f"{heading}: {step}"


def test_a_wrong_place_is_found():
    tree = ast.parse("class Known:\n    def method(self): ...\ndef function(): ...")
    assert definition(tree, "Known.method") and definition(tree, "function")
    assert definition(tree, "Known.gone") is None and definition(tree, "method") is None
