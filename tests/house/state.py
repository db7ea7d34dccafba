"""The figures of the house: `python -m tests.house.state` prints them, `--record` keeps them as the bar.

`tests/house/state.json` has the last ones that were recorded: none may get worse (`test_state.py`).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

from tests.house.floors import levels
from tests.house.runs import collective_frames, gradient_frames, imported_lines
from tests.house.sources import (
    ROOT,
    imported_from,
    lines_of_code,
    pages,
    python_files,
    rooms,
    source_files,
    tree_of,
)
from tests.house.words import bad_words, messages_in_form

__all__ = ["FIGURES", "RECORD", "Figure"]

RECORD = Path(__file__).with_name("state.json")
#: The rooms of the highest floor, which are used with a training step and no part of it.
AROUND = set(levels()[-1])
_TRAINER = ROOT / "strategies" / "keras_patches" / "trainer.py"
_PATH = ROOT / "tfdist" / "gradients" / "path.py"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that says how the house stands.

    Attributes:
        name: What it counts.
        aim: Where it is to come.
        count: Counts it.
        more_is_better: Whether it is to grow.
        on_ranks: Whether ranks are started for it.
    """

    name: str
    aim: int
    count: Callable[[], int]
    more_is_better: bool = False
    on_ranks: bool = False


def core_lines() -> int:
    """Lines of code of what runs in a step, in `fit` and in a checkpoint; Python and C++."""
    return sum(
        lines_of_code(path) for room in rooms() if room not in AROUND for path in source_files(room)
    )


def floors() -> int:
    """The levels of the contract of import-linter."""
    return len(levels())


def contracts() -> int:
    """The contracts of import-linter."""
    return len(_contracts())


def _contracts() -> list[dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def isinstances_of_fit() -> int:
    """How often the patch of `fit` asks whether something is of a class of tfdist."""
    ours = imported_from(_TRAINER)
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in ours for part in ast.walk(node.args[1]))
        for node in ast.walk(tree_of(_TRAINER))
    )


def imports_of_fit() -> int:
    """The import statements of tfdist in the patch of `fit`."""
    return sum(
        isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfdist"
        for node in ast.walk(tree_of(_TRAINER))
    )


def extensions() -> int:
    """The extensions that outside programs can make: each has a file of tests."""
    return len(list((ROOT / "tests" / "extend").glob("test_*.py")))


def public_names() -> int:
    """What `docs/api.txt` lists."""
    lines = (ROOT / "docs" / "api.txt").read_text().splitlines()
    return sum(bool(line) and line[0] != "#" for line in lines)


def mutable_hooks() -> int:
    """Attributes of `DistributedStrategy` and its extended part that features set from outside."""
    text = "".join(
        path.read_text()
        for room in rooms()
        for path in python_files(room)
        if room in ("step", "strategies")
    )
    return sum(
        text.count(name) > 0
        for name in ("noise_meter: ", "accumulation: Changing", "self.work_meter: ")
    )


def files_too_long() -> int:
    """Python files of more than 400 lines."""
    return sum(
        len(path.read_text().splitlines()) > 400 for room in rooms() for path in python_files(room)
    )


FIGURES = (
    Figure("lines of code of the core", 20_500, core_lines),
    Figure("lines that a data parallel fit imports", 20_000, imported_lines, on_ranks=True),
    Figure("floors", 7, floors),
    Figure("contracts", 15, contracts, more_is_better=True),
    Figure("folders and modules in tfdist/", 26, lambda: len(rooms())),
    Figure("frames of a gradient", 10, lambda: len(gradient_frames()), on_ranks=True),
    Figure("files of a gradient's frames", 7, lambda: _files(gradient_frames()), on_ranks=True),
    Figure("frames of a collective", 4, lambda: len(collective_frames()), on_ranks=True),
    Figure("isinstance of features in the patch of fit", 0, isinstances_of_fit),
    Figure("imports of tfdist in the patch of fit", 12, imports_of_fit),
    Figure("lines of the gradient path", 130, lambda: len(_PATH.read_text().splitlines())),
    Figure("mutable hooks of the strategy", 0, mutable_hooks),
    Figure("extensions with tests", 7, extensions, more_is_better=True),
    Figure("public names of the core", 90, public_names),
    Figure("words of the list", 0, lambda: len(bad_words())),
    Figure("messages in another form", 20, lambda: len(messages_in_form()[1])),
    Figure("files of more than 400 lines", 0, files_too_long),
    Figure("pages", 20, lambda: len(pages()) - 1),
    Figure("words of the pages", 32_000, lambda: sum(len(p.read_text().split()) for p in pages())),
)


def _files(frames: list[str]) -> int:
    return len({frame.partition(":")[0] for frame in frames})


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="keeps the figures as the bar")
    parser.add_argument("--quick", action="store_true", help="leaves out what starts ranks")
    options = parser.parse_args()
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = dict(before)
    for figure in FIGURES:
        if not (options.quick and figure.on_ranks):
            found[figure.name] = figure.count()
            last = before.get(figure.name, "")
            print(f"{figure.name:46} {found[figure.name]:7,}  aim {figure.aim:7,}  recorded {last}")
    if options.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
