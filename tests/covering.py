"""Chooses cases of long crosses of parameters: each test, and each value of each parameter, at least once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: A value of a parameter: its name, and the value as text. A test counts as a value of the parameter "test".
Value = tuple[str, str]


def choose(cases: Sequence[set[Value]], covered: Iterable[set[Value]], first: int = 0) -> list[int]:
    """Returns the indices of the cases to run, chosen greedily.

    Args:
        cases: The values of each case.
        covered: The values of cases that run anyway.
        first: The index of the case that is preferred of equally good ones, then those after it.
    """
    missing = set().union(*cases).difference(*covered)
    order = [(first + place) % len(cases) for place in range(len(cases))]
    chosen = []
    while missing:
        best = max(order, key=lambda number: len(cases[number] & missing))
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen)
