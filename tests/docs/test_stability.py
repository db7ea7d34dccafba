"""The stability page gives every public name one level."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT
from tests.public import public_objects

_ROW = re.compile(r"^\| (`tfdist[^|]*`) \| (\w+) \|$", re.MULTILINE)


def levels() -> dict[str, str]:
    """Level by the name of an object or of a room, as the page has them."""
    found: dict[str, str] = {}
    for names, level in _ROW.findall((ROOT / "docs" / "stability.md").read_text()):
        for name in re.findall(r"`([^`]+)`", names):
            if name in found:
                raise ValueError(f"{name} stands there twice.")
            found[name] = level
    return found


def level_of(name: str, given: dict[str, str]) -> str | None:
    """The level of a name, or of the longest part of it that has one."""
    while name and name not in given:
        name = name.rpartition(".")[0]
    return given.get(name)


def test_every_public_name_has_a_level_that_is_explained():
    given, text = levels(), (ROOT / "docs" / "stability.md").read_text()
    assert not [name for name in public_objects() if level_of(name, given) is None]
    for level in set(given.values()):
        assert f"\n| {level} | " in text, level


def test_what_two_rooms_export_has_one_level():
    given, found = levels(), {}
    for name, value in public_objects().items():
        if isinstance(value, type):
            found.setdefault(value, set()).add(level_of(name, given))
    assert not {kind for kind, all_levels in found.items() if len(all_levels) > 1}


def test_every_row_is_about_a_public_name():
    public = public_objects()
    idle = [
        name for name in levels() if not any(f"{full}.".startswith(f"{name}.") for full in public)
    ]
    assert not idle, idle


@pytest.mark.parametrize("name", ["tfdist.callbacks.Checkpointer", "tfdist.checkpoint.save"])
def test_longer_names_decide(name):
    given = levels()
    assert level_of(name, given) == "frozen"
    assert level_of("tfdist.addons.monitoring.ExpertLoad", given) == "settled"
    assert level_of("elsewhere.save", given) is None
