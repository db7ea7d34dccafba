"""Which of many slow cases a run takes, so that eight runs take all of them."""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
from collections.abc import Sequence

from tests import covering

#: Of a parameter with more values than this, as families of models and scripts are, a run takes an eighth, and
#: the next function of the file begins with another one.
LONG = 8
PARTS = tuple("12345678")
#: A run takes an eighth of the slow cases that take longer, or were never timed.
LONG_SECONDS = 5.0


def left_out(items: Sequence, cross: str, seconds: dict[str, float]) -> set:
    """Returns the cases that a run leaves out.

    Args:
        items: All cases that were collected.
        cross: "1" to "8", an eighth; "each", all of what is not divided; see `--cross`.
        seconds: What each case took, by its id.
    """
    part = None if cross == "each" else PARTS.index(cross)
    without = {item for item in items if _is_slow(item, full=True)}
    files = collections.defaultdict(list)
    for item in items:
        if item in without:
            continue
        if hasattr(item, "callspec"):
            files[item.path].append(item)
        elif part is not None and _is_in_another_part(item, part, seconds):
            without.add(item)
    for cases in files.values():
        some = cases if part is None else _part_of(cases, part, seconds)
        always = [case for case in cases if _runs_always(case)]
        rest = [case for case in some if case not in always]
        number = 0 if part is None else len(rest) * part // len(PARTS)
        given = [_values(case) for case in rest], [_values(case) for case in always], number
        chosen = {rest[number] for number in covering.choose(*given)}
        without |= {case for case in cases if case not in chosen and case not in always}
    return without


def _is_slow(item, **options) -> bool:
    return any(options.items() <= mark.kwargs.items() for mark in item.iter_markers("slow"))


def _runs_always(case) -> bool:
    return not _is_slow(case) or hasattr(case.function, "runs_every_case")


def _part_of(cases, part: int, seconds: dict[str, float]) -> list:
    """The cases whose values of long parameters are in this part, the others unless they take long.

    The next function of the file begins with another part.
    """
    taken = []
    functions = itertools.groupby(cases, key=lambda case: case.originalname)
    for number, (_, group) in enumerate(functions):
        own = list(group)
        every: dict[str, dict[str, int]] = collections.defaultdict(dict)
        for case in own:
            for name, value in _parameters(case).items():
                every[name].setdefault(value, len(every[name]))
        long = {name for name, values in every.items() if len(values) > LONG}
        for case in own:
            places = [
                every[name][value] for name, value in _parameters(case).items() if name in long
            ]
            is_other = any((place - part - number) % len(PARTS) for place in places)
            if not places:
                is_other = _is_in_another_part(case, part, seconds)
            if _runs_always(case) or not is_other:
                taken.append(case)
    return taken


def _is_in_another_part(case, part: int, seconds: dict[str, float]) -> bool:
    """Whether a slow case takes long, or was never timed, and is in another part, whatever else is collected."""
    if _runs_always(case) or seconds.get(case.nodeid, math.inf) <= LONG_SECONDS:
        return False
    return hashlib.sha256(case.nodeid.encode()).digest()[0] % len(PARTS) != part


def _parameters(case) -> dict[str, str]:
    return {name: repr(value) for name, value in case.callspec.params.items()}


def _values(case) -> set[covering.Value]:
    return {("test", case.originalname), *_parameters(case).items()}
