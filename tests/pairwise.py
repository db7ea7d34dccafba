"""Which cases of a long matrix `make test-all` runs; `make test-matrix` runs the others.

Of three parameters or more that vary, the cases together hold each pair of values; of two, each
value. Faults that need three certain values at once are rare (Kuhn, Wallace and Gallo 2004, "Software Fault
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
    covered = list(covered)
    every = [*cases, *covered]
    varied = [name for name in every[0] if len({case[name] for case in every}) > 1] if every else []
    parts = [_parts(case, varied) for case in cases]
    missing = set().union(*parts) - set().union(*[_parts(case, varied) for case in covered])
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def _parts(case: Mapping[str, str], varied: Iterable[str]) -> set:
    """What a case covers: pairs of values, or single ones where fewer than three parameters vary."""
    values = sorted((name, case[name]) for name in varied)
    return set(itertools.combinations(values, 2 if len(values) > 2 else 1))
