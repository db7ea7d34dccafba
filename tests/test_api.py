"""The public names: what the package exports, what `docs/api.txt` lists, and what documents use."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import tfdist

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "api.txt"
#: Documents for those who work on tfdist itself.
INSIDE = {"architecture.md"}
#: Rooms that documents name as a whole, and a file.
ROOMS = {"tfdist.collectives.mappings", "tfdist.pipeline.timeline", "tfdist.lock"}


def exported() -> list[str]:
    names = []
    rooms = [("tfdist", tfdist)]
    for module_name, module in rooms:
        for name in module.__all__:
            full_name = f"{module_name}.{name}"
            value = getattr(module, name)
            if inspect.ismodule(value):
                rooms.append((full_name, importlib.import_module(full_name)))
            else:
                names.append(full_name)
    return sorted(names)


def test_the_list_is_what_is_exported():
    listed = [line for line in LIST.read_text().splitlines() if line and line[0] != "#"]
    assert listed == exported()


def test_everything_public_has_a_docstring():
    for name in exported():
        value = importlib.import_module(name.rpartition(".")[0])
        assert inspect.getdoc(getattr(value, name.rpartition(".")[2])), name


def test_documents_use_public_names():
    public = set(exported())
    rooms = ROOMS | {name.rpartition(".")[0] for name in public}
    wrong = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if document.name in INSIDE:
            continue
        text = document.read_text()
        # Programs that are run by `python -m` are no part of the interface.
        text = re.sub(r"-m tfdist\.[\w.]+", "", text)
        for found in re.findall(r"(?<![\w/.-])tfdist(?:\.\w+)+", text):
            parts = found.split(".")
            prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            if not prefixes & public and found not in rooms:
                wrong.append(f"{document.name}: {found}")
    assert not wrong, "\n".join(sorted(set(wrong)))
