"""`--batch_shares`: the number of rows of a batch for each rank."""

from __future__ import annotations

from tfdist.launch.flags.values import MOST_RANKS, refuse
from tfdist.step import shares

_WORDS = {"equal": None, "measured": "measured"}
_MEANING = (
    "equal, measured, or a positive number for each rank with different rows, such as 3,1, the largest at "
    f"most {shares.MOST_RATIO:,.0f} times the smallest"
)


def check_batch_shares(flag: str, value: str) -> None:
    """Reject invalid shares; the number of ranks is not known yet."""
    if value in _WORDS:
        return
    try:
        shares.check_batch_shares([float(each) for each in value.split(",", MOST_RANKS)])
    except ValueError:
        raise refuse(flag, value, _MEANING) from None


def make_batch_shares(value: str) -> str | list[float] | None:
    """The argument of a strategy for a checked value."""
    if value in _WORDS:
        return _WORDS[value]
    return [float(each) for each in value.split(",")]
