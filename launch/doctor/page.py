"""The page that `tfdist-doctor` prints."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

from tfdist.launch.doctor.findings import Finding, Section, State

_COLOURS = {State.OK: "\x1b[32m", State.NOTE: "\x1b[33m", State.PROBLEM: "\x1b[1;31m"}
_PLAIN = "\x1b[0m"
_BOLD = "\x1b[1m"
_WIDEST = 100


def wants_colours(file: TextIO) -> bool:
    """Whether a file is a terminal that shows colors, unless NO_COLOR (no-color.org) is set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def has_problems(sections: Sequence[Section]) -> bool:
    """Whether there is a finding that prevents training."""
    return _count(sections, State.PROBLEM) > 0


def print_page(sections: Sequence[Section], file: TextIO) -> None:
    """Print the findings, each followed by an arrow and its remedy."""
    colours = wants_colours(file)
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    names = [finding.what for section in sections for finding in section.findings]
    column = min(max(map(len, names), default=0), 22)
    for section in sections:
        if section.findings:
            print(_in(_BOLD, section.title, colours), file=file)
            for finding in section.findings:
                print(_shown(finding, column, width, colours), file=file)
    problems, notes = _count(sections, State.PROBLEM), _count(sections, State.NOTE)
    verdict = "No problem was found"
    if problems:
        verdict = f"{problems} problem{'s' * (problems > 1)}, with remedies after ->"
    if notes:
        verdict += f"; {notes} note{'s' * (notes > 1)}"
    print(f"{verdict}.", file=file)


def _count(sections: Sequence[Section], state: State) -> int:
    return sum(finding.state is state for section in sections for finding in section.findings)


def _shown(finding: Finding, column: int, width: int, colours: bool) -> str:
    mark = f"{finding.state.value:<7}"
    begin = f"  {mark}  {finding.what:<{column}}  "
    # The text may contain external strings, such as host names or output of programs.
    text = "".join(letter if letter.isprintable() else "?" for letter in finding.text)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [begin.rstrip()]
    lines[0] = lines[0].replace(mark, _in(_COLOURS[finding.state], mark, colours), 1)
    if finding.remedy:
        lines += textwrap.wrap(
            finding.remedy,
            width,
            initial_indent=" " * 11 + "-> ",
            subsequent_indent=" " * 14,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _in(colour: str, text: str, colours: bool) -> str:
    return f"{colour}{text}{_PLAIN}" if colours else text
