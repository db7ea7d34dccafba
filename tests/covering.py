"""Which cases of a long cross a run takes: some that together hold each value of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def choose(cases: Sequence[Mapping[str, str]], covered: Iterable[Mapping[str, str]]) -> list[int]:
    """Returns the numbers of the cases to run, chosen greedily.

    Args:
        cases: For each case the value of each parameter, by name.
        covered: Cases that run anyway.
    """
    covered = list(covered)
    every = [*cases, *covered]
    varied = [name for name in every[0] if len({case[name] for case in every}) > 1] if every else []
    parts = [{(name, case[name]) for name in varied} for case in cases]
    missing = set().union(*parts)
    missing -= {(name, case[name]) for case in covered for name in varied}
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)
