"""Which cases of a long matrix `make test-all` runs; `make test-matrix` runs the others.

Of three parameters or more, the cases together hold each pair of values; of two, each value. Faults
that need three certain values at once are rare (Kuhn, Wallace and Gallo 2004, "Software Fault
Interactions and Implications for Software Testing").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["choose"]


def choose(cases: Sequence[Mapping[str, str]], covered: Iterable[Mapping[str, str]]) -> list[int]:
    """Returns the numbers of the cases to run, chosen greedily.

    Args:
        cases: For each case the value of each parameter, by name.
        covered: Cases that run anyway.
    """
    parts = [_parts(case) for case in cases]
    missing = set().union(*parts) - set().union(*map(_parts, covered))
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def _parts(case: Mapping[str, str]) -> set:
    """What a case covers: pairs of values, or single ones where there are fewer than three."""
    values = sorted(case.items())
    return set(itertools.combinations(values, 2 if len(values) > 2 else 1))
