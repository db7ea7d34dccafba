"""The floors of the document are those that import-linter checks."""

from __future__ import annotations

import pytest

from tests.house.floors import DOCUMENT, MARK, levels, table
from tests.house.sources import ROOT, rooms

pytestmark = pytest.mark.skipif(
    not (ROOT / "tfdist" / "addons").is_dir(), reason="no tfdist.addons"
)


def test_every_room_has_a_floor():
    assert sorted(room for level in levels() for room in level) == rooms()


def test_the_table_of_the_document_is_that_of_the_rooms():
    _, _, rest = DOCUMENT.read_text().partition(f"<!-- {MARK} -->\n")
    found, _, _ = rest.partition("<!-- end -->")
    assert found.strip() == table(), "Run `python -m tests.house.floors`."
