"""The folders of tests are the rooms of the package, and those of subjects across rooms."""

from __future__ import annotations

from pathlib import Path

from tests.house.sources import ROOT, rooms

TESTS = ROOT / "tests"
#: Of no room, or of several.
ACROSS = {
    *("benchmarks", "bugs", "docs", "examples", "extend", "faults", "gpu_like"),
    *("hosts", "house"),
    *("packaging", "parity", "values", "versions"),
}


def folders(path: Path) -> set[str]:
    return {each.name for each in path.iterdir() if each.is_dir() and each.name[0] not in "._"}


def test_each_folder_is_a_room():
    assert folders(TESTS) - ACROSS <= {*rooms()}
    assert folders(TESTS) >= ACROSS


def test_add_ons_and_programs_have_folders_of_their_own():
    for room in ("addons", "launch"):
        # The add-ons may have been left out.
        if (TESTS / room).is_dir():
            assert folders(TESTS / room) <= folders(ROOT / "tfdist" / room), room
