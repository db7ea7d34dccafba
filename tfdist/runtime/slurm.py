"""Slurm's compact notation for the nodes of a job."""

from __future__ import annotations

import itertools
import math
import re

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
#: More than any cluster has. A range with a typo could exhaust the memory otherwise.
MOST_NODES = 65_536


def expand_node_list(text: str) -> list[str]:
    """Expands a list of nodes: `a[1-2,007]b,c` is a1b, a2b, a007b and c.

    A number is padded to the number of digits of the first in its range. The order of the nodes is
    Slurm's: of several groups in a name the last varies fastest.

    Raises:
        ValueError: The list is malformed.
    """
    names: list[str] = []
    for item in _split(text):
        # The contents of the brackets are at the odd indices.
        pieces = _GROUP.split(item)
        for piece in pieces[::2]:
            if found := re.search(r"[\[\]\s()]", piece):
                raise _malformed(text, f"{found[0]!r} is out of place in {item!r}")
        groups = [_ranges(text, piece) for piece in pieces[1::2]]
        sizes = (sum(numbers.stop - numbers.start for numbers, _ in group) for group in groups)
        if len(names) + math.prod(sizes) > MOST_NODES:
            raise _malformed(text, f"there are more than {MOST_NODES} nodes")
        written = [
            [f"{number:0{width}d}" for numbers, width in group for number in numbers]
            for group in groups
        ]
        for numbers in _in_slurms_order(written):
            names.append("".join(itertools.chain(*zip(pieces[::2], [*numbers, ""], strict=True))))
    return names


def _ranges(text: str, inside: str) -> list[tuple[range, int]]:
    """The ranges between two brackets, each with the number of its digits."""
    ranges = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _malformed(text, f"[{inside}] contains {part!r}, not a number or a range")
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1)
        if not numbers:
            raise _malformed(text, f"the range {part!r} runs backwards")
        ranges.append((numbers, len(found[1])))
    return ranges


def _in_slurms_order(groups: list[list[str]]) -> list[tuple[str, ...]]:
    """Every choice of one number from each group.

    Slurm parses a name from its end: the last group varies fastest, then the first, the second and
    so on.
    """
    slowest_first = [*groups[-2::-1], *groups[-1:]]
    choices = itertools.product(*slowest_first)
    return [(*choice[-2::-1], *choice[-1:]) for choice in choices]


def _split(text: str) -> list[str]:
    """Splits a list at its commas, except at those between brackets."""
    if re.search(r"[\[\]]", _GROUP.sub("", text)):
        raise _malformed(text, "its brackets do not match")
    items = re.split(r",(?![^\[]*\])", text.strip())
    if not all(items):
        raise _malformed(text, "a name is empty")
    return items


def _malformed(text: str, why: str) -> ValueError:
    return ValueError(
        f"A list of Slurm's nodes must be written as node[01-04,7],login1. Received: {text!r}; {why}. "
        "Slurm itself expands it by: scontrol show hostnames."
    )
