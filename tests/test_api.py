"""The public names: what the package exports, what `docs/api.txt` lists, and what documents use."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.house.sources import documents
from tests.processes import python
from tests.public import is_addon, public_objects

ROOT = Path(__file__).parents[1]
#: Documents for those who work on tfdist itself.
INSIDE = {"code_tour.md"}
#: Modules that are not public, of which the documents say so, a file, and a group of entry points.
ROOMS = {"tfdist.collectives.mappings", "tfdist.lock", "tfdist.plugins"}


@pytest.mark.parametrize(("file", "of_addons"), [("api.txt", False), ("api_addons.txt", True)])
def test_the_lists_are_what_is_exported(file, of_addons):
    lines = (ROOT / "docs" / file).read_text().splitlines()
    listed = [line for line in lines if line and line[0] != "#"]
    assert listed == sorted(name for name in public_objects() if is_addon(name) == of_addons)


def test_no_name_is_public_in_two_places():
    places: dict[int, list[str]] = {}
    for name, value in public_objects().items():
        if inspect.isclass(value) or inspect.isfunction(value):
            places.setdefault(id(value), []).append(name)
    assert not [names for names in places.values() if len(names) > 1]


def test_everything_public_has_a_docstring():
    for name, value in public_objects().items():
        assert inspect.getdoc(value), name


def test_documents_use_public_names():
    public = set(public_objects())
    rooms = ROOMS | {"tfdist.addons"} | {name.rpartition(".")[0] for name in public}
    wrong = []
    for document in documents():
        if document.name in INSIDE:
            continue
        text = document.read_text()
        # Programs that are run by `python -m` are no part of the interface.
        text = re.sub(r"-m tfdist\.[\w.]+", "", text)
        for found in re.findall(r"(?<![\w/.-])tfdist(?:\.\w+)+", text):
            parts = found.split(".")
            prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            if not prefixes & public and found not in rooms:
                wrong.append(f"{document.relative_to(ROOT)}: {found}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_names_in_examples_exist_in_a_process_that_imported_nothing_else():
    files = [path for end in ("py", "ipynb") for path in (ROOT / "examples").glob(f"*.{end}")]
    sources = "\n".join(path.read_text() for path in files)
    found = set(re.findall(r"(?<![\w/.-])tfdist(?:\.\w+)+", re.sub(r"import .*", "", sources)))
    for module, imported in re.findall(r"from (tfdist[\w.]*) import ([\w, ]+)", sources):
        found |= {f"{module}.{name}" for name in re.split(r"\W+", imported) if name}
    names = sorted(found)
    assert {"tfdist.testing.faults.FlipBit", "tfdist.addons.planner"} <= found
    # Each in the state that a program would find: what an earlier one imports does not count.
    program = (
        "import functools, os, sys, keras, tensorflow, tfdist\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n"
        "            functools.reduce(getattr, name.split('.')[1:], tfdist)\n"
        "        except AttributeError as error:\n"
        "            print(name, error, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    assert python(program, *names) == ""
