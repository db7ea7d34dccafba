"""The public names: what the package exports, what `docs/api.txt` lists, and what documents use."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tests.public import public_objects

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "api.txt"
#: Documents for those who work on tfdist itself.
INSIDE = {"architecture.md"}
#: Modules that are not public, of which the documents say so, a file, and a group of entry points.
ROOMS = {"tfdist.collectives.mappings", "tfdist.pipeline.timeline", "tfdist.lock", "tfdist.plugins"}


def test_the_list_is_what_is_exported():
    listed = [line for line in LIST.read_text().splitlines() if line and line[0] != "#"]
    assert listed == sorted(public_objects())


def test_everything_public_has_a_docstring():
    for name, value in public_objects().items():
        assert inspect.getdoc(value), name


def test_documents_use_public_names():
    public = set(public_objects())
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
