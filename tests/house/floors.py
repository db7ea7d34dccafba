"""The table of floors in `docs/code_tour.md`, from `pyproject.toml` and the docstrings of the rooms.

`python -m tests.house.floors` renews it.
"""

from __future__ import annotations

import ast
import tomllib

from benchmarks.measuring import write_between
from tests.house.sources import PACKAGE, ROOT, rooms, tree_of

__all__ = ["DOCUMENT", "MARK", "levels", "table"]

DOCUMENT = ROOT / "docs" / "code_tour.md"
MARK = "floors"


def levels() -> list[list[str]]:
    """The rooms of each floor, from the lowest to the highest, as import-linter has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = [each for each in settings["contracts"] if each["type"] == "layers"]
    return [level.split(" : ") for level in reversed(floors["layers"])]


def table() -> str:
    """A line for each room, from the highest floor to the lowest, with the first line of its docstring."""
    lines = ["| Floor | Room | What it holds |", "|---|---|---|"]
    found = levels()
    for floor in range(len(found), 0, -1):
        for room in sorted(found[floor - 1]):
            lines.append(f"| {floor} | `{_place(room)}` | {_first_line(room)} |")
    return "\n".join(lines)


def _place(room: str) -> str:
    if (PACKAGE / f"{room}.py").exists():
        return f"tfdist/{room}.py"
    return f"{room}/" if (PACKAGE / room).is_symlink() else f"tfdist/{room}/"


def _first_line(room: str) -> str:
    module = PACKAGE / f"{room}.py"
    path = module if module.exists() else (PACKAGE / room).resolve() / "__init__.py"
    text = ast.get_docstring(tree_of(path))
    if not text:
        raise ValueError(f"{path} requires a docstring, whose first line says what the room holds.")
    return text.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    if sorted(room for level in levels() for room in level) != rooms():
        raise SystemExit("pyproject.toml does not list all rooms.")
    write_between(DOCUMENT, MARK, table())
