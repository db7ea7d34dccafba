"""Slurm's short forms: lists of nodes, and numbers of tasks on them.

Slurm tells jobs and steps in this way which nodes they have.
"""

from __future__ import annotations

import itertools
import math
import re

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?")
#: More than any cluster has. A range with a digit too many would fill the memory otherwise.
_MOST_NODES = 65_536


def expand_node_list(text: str) -> list[str]:
    """Writes out a list of nodes: `a[1-2,007]b,c` is a1b, a2b, a007b and c.

    A number has at least as many digits as the first of its range. The nodes come in the order in
    which Slurm names them: of several groups in a name the last runs fastest.

    Raises:
        ValueError: It is no such list.
    """
    names: list[str] = []
    for item in _split(text):
        # What stood between brackets is at the odd places.
        pieces = _GROUP.split(item)
        for piece in pieces[::2]:
            if found := re.search(r"[\[\]\s()]", piece):
                raise _malformed(text, f"{found[0]!r} is out of place in {item!r}")
        groups = [_Group(text, piece) for piece in pieces[1::2]]
        if len(names) + math.prod(group.size for group in groups) > _MOST_NODES:
            raise _malformed(text, f"there are more than {_MOST_NODES} nodes")
        for numbers in _in_slurms_order([group.numbers() for group in groups]):
            names.append("".join(itertools.chain(*zip(pieces[::2], [*numbers, ""], strict=True))))
    return names


def expand_tasks_per_node(text: str) -> list[int]:
    """Writes out how many tasks each node has: `2(x3),1` is 2, 2, 2 and 1."""
    counts: list[int] = []
    for item in text.strip().split(","):
        found = _COUNT.fullmatch(item)
        if found is None or len(counts) + int(found[2] or 1) > _MOST_NODES:
            raise ValueError(
                "Tasks per node are positive numbers, each with how often it comes, as in 2(x3),1. "
                f"Received: {text!r}."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


class _Group:
    """What stands between two brackets: numbers and ranges of numbers."""

    def __init__(self, text: str, inside: str):
        self._ranges: list[tuple[int, int, int]] = []
        for part in inside.split(","):
            found = _RANGE.fullmatch(part)
            if found is None:
                raise _malformed(text, f"[{inside}] holds {part!r}, not a number or a range")
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                raise _malformed(text, f"the range {part!r} runs backwards")
            self._ranges.append((first, last, len(found[1])))

    @property
    def size(self) -> int:
        return sum(last - first + 1 for first, last, _ in self._ranges)

    def numbers(self) -> list[str]:
        return [
            f"{number:0{width}d}"
            for first, last, width in self._ranges
            for number in range(first, last + 1)
        ]


def _in_slurms_order(groups: list[list[str]]) -> list[tuple[str, ...]]:
    """Every choice of one number from each group.

    Slurm takes a name apart from its end: the last group runs fastest, and then the first, the
    second and so on.
    """
    slowest_first = [*groups[-2::-1], *groups[-1:]]
    choices = itertools.product(*slowest_first)
    return [(*choice[-2::-1], *choice[-1:]) for choice in choices]


def _split(text: str) -> list[str]:
    """Cuts a list at its commas, except at those between brackets."""
    items, inside = [""], False
    for character in text.strip():
        if character in "[]":
            if inside == (character == "["):
                raise _malformed(text, "its brackets do not come in pairs")
            inside = not inside
        if character == "," and not inside:
            items.append("")
        else:
            items[-1] += character
    if inside:
        raise _malformed(text, "its brackets do not come in pairs")
    if not all(items):
        raise _malformed(text, "a name is empty")
    return items


def _malformed(text: str, why: str) -> ValueError:
    return ValueError(
        f"A list of Slurm's nodes is written as node[01-04,7],login1. Received: {text!r}; {why}. "
        "Slurm itself writes it out by: scontrol show hostnames."
    )
