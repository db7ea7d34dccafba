"""What a user most likely did, where ranks wait for others that do not come."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ARGUMENTS", "likely_cause"]

#: Ends the name of the collective that `fit`, `evaluate` and `predict` begin with.
ARGUMENTS = "/arguments"
_KINDS = ("fit", "evaluate", "predict")


def likely_cause(collective: str, there: Sequence[int], missing: Sequence[int]) -> str:
    """The cause that a verdict names first; "" where none is likelier than others.

    Args:
        collective: The collective's name.
        there: The ranks that wait in it.
        missing: Those that do not.

    Returns:
        A sentence with a blank behind it, or "".
    """
    kind = next((kind for kind in _KINDS if f"/{kind}{ARGUMENTS}" in collective), None)
    if kind is None or not there or not missing:
        return ""
    return (
        f"{_ranks(there).capitalize()} called `{kind}`, {_ranks(missing)} did not: all ranks call it, "
        "also where `strategy.is_chief` is False. "
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
