"""`--batch_shares`: how many rows of a batch each rank gets."""

from __future__ import annotations

from tfdist.launch.flag_values import MOST_RANKS, refuse
from tfdist.step import shares

_WORDS = {"equal": None, "measured": "measured"}
_MEANING = (
    "equal, measured, or a positive number for each rank that holds other rows, as 3,1, the largest at "
    f"most {shares.MOST_RATIO:,.0f} times the smallest"
)


def check_batch_shares(flag: str, value: str) -> None:
    """Refuses what no ranks can have as their shares; how many ranks there are is not known yet."""
    if value in _WORDS:
        return
    try:
        shares.check_batch_shares([float(each) for each in value.split(",", MOST_RANKS)])
    except ValueError:
        raise refuse(flag, value, _MEANING) from None


def make_batch_shares(value: str) -> str | list[float] | None:
    """What a strategy takes for a checked value."""
    if value in _WORDS:
        return _WORDS[value]
    return [float(each) for each in value.split(",")]
