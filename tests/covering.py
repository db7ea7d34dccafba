"""Which cases of a long matrix a run takes: a covering array of a strength.

Of strength 1 the cases together hold each value of each parameter, of strength 2 each pair of values.
Faults that need three certain values at once are rare (Kuhn, Wallace and Gallo 2004, "Software Fault
Interactions and Implications for Software Testing").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["choose"]


def choose(
    cases: Sequence[Mapping[str, str]], covered: Iterable[Mapping[str, str]], strength: int
) -> list[int]:
    """Returns the numbers of the cases to run, chosen greedily.

    Args:
        cases: For each case the value of each parameter, by name.
        covered: Cases that run anyway.
        strength: Of how many parameters each combination of values is to be there. Where fewer than
            three vary, it is that of one.
    """
    covered = list(covered)
    every = [*cases, *covered]
    varied = [name for name in every[0] if len({case[name] for case in every}) > 1] if every else []
    if len(varied) < 3:
        strength = 1
    parts = [_parts(case, varied, strength) for case in cases]
    missing = set().union(*parts)
    missing -= set().union(*[_parts(case, varied, strength) for case in covered])
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def _parts(case: Mapping[str, str], varied: Iterable[str], strength: int) -> set:
    values = sorted((name, case[name]) for name in varied)
    return set(itertools.combinations(values, strength))
