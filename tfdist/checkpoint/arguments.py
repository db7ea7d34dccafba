"""Arguments that are checked where they enter."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["check_bool", "check_number", "check_seconds"]


def check_number(
    name: str, value: Any, *, least: int, most: int = 1 << 62, optional: bool = False
) -> None:
    """Raises where a value is not a whole number in a range.

    Args:
        name: The argument, for the message.
        value: What was given.
        least: The smallest that is right.
        most: The largest.
        optional: Whether None is right, too.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of the range.
    """
    if optional and value is None:
        return
    or_none = ", or None" if optional else ""
    message = f"`{name}` is a whole number of at least {least}{or_none}. Received: {value!r:.200}."
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message)
    if not least <= int(value) <= most:
        raise ValueError(message)


def check_seconds(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises where a value is not a positive number of seconds.

    Args:
        name: The argument, for the message.
        value: What was given.
        optional: Whether None is right, too.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or not above 0.
    """
    if optional and value is None:
        return
    or_none = ", or None" if optional else ""
    message = f"`{name}` is a positive number of seconds{or_none}. Received: {value!r:.200}."
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(message)


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError where a value is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is True or False. Received: {value!r:.200}.")
