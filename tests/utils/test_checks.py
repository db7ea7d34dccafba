"""How messages show what they quote."""

from __future__ import annotations

import pytest

from tfdist.utils.checks import one_line


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("a line\n  and another", 500, "a line and another"),
        ("nothing is lost", 15, "nothing is lost"),
        ("no word is cut in the middle", 20, "no word is cut ..."),
        ("x" * 40, 20, "x" * 16 + " ..."),
        (ValueError("an error"), 500, "an error"),
        ("", 10, ""),
    ],
)
def test_a_quoted_text_ends_after_a_word_and_says_that_it_goes_on(text, most, shown):
    found = one_line(text, most)
    assert found == shown and len(found) <= most
