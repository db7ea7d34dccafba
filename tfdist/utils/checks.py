"""Checks of arguments: each returns the value, or raises an error with a one-line message.

The message names the argument and shows the value. TensorFlow and Keras report a wrong value where it
causes an error, often far from the call that passed it. Nothing here needs either.

The arguments of the checks mean the same everywhere: `name` is the argument that is checked, `value`
what was passed, `minimum` and `maximum` the inclusive bounds, `above` and `below` the exclusive ones.
`optional` allows None too, and `also` describes None or another value in the message. The error is a
TypeError for an object of a wrong kind, and a ValueError otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import operator
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: The largest integer that is accepted by default: the largest int32.
LARGEST = 2**31 - 1
#: The maximum of arguments in seconds.
YEAR_SECONDS = 366 * 24 * 3600
_SHOWN_CHARACTERS = 80
_BOUNDS = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


def shown(value: Any) -> str:
    """A value as messages show it: its `repr` on one line, shortened."""
    try:
        found = " ".join(repr(value).split())
    except Exception as error:
        found = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    if len(found) > _SHOWN_CHARACTERS:
        found = f"{found[: _SHOWN_CHARACTERS - 3]}..."
    return found


def one_line(text: object, most: int = 500) -> str:
    """A text on one line; a longer one is cut after a whole word and ends with " ..."."""
    words = " ".join(str(text).split())
    if len(words) <= most:
        return words
    if " " not in words[: most - 3]:
        return f"{words[: most - 4]} ..."
    return textwrap.shorten(words, most, placeholder=" ...")


def refuse(name: str, value: Any, meaning: str, error: type[Exception] = ValueError) -> Exception:
    """The exception for a wrong value; `meaning` describes the values that are accepted."""
    return error(f"`{name}` must be {meaning}. Received: {name}={shown(value)}.")


def integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    optional: bool = False,
    also: str = "",
) -> Any:
    """Checks an integer of Python or NumPy, at most `LARGEST` by default; booleans are rejected."""
    most = LARGEST if maximum is None else maximum
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_integer and (minimum is None or value >= minimum) and value <= most:
        return int(value)
    if is_integer and value > most:
        maximum = most
    return _none(name, value, f"an int{_range(minimum, maximum)}", optional, also)


def number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    optional: bool = False,
    also: str = "",
) -> Any:
    """Checks a finite real number; returns an int or a float of Python."""
    given = zip(_BOUNDS, (minimum, above, maximum, below), strict=True)
    bounds = [(words, bound) for words, bound in given if bound is not None]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        found = int(value) if isinstance(value, numbers.Integral) else float(value)
        if _is_finite(found) and all(_BOUNDS[words](found, bound) for words, bound in bounds):
            return found
    listed = " and ".join(f"{words} {bound:,}" for words, bound in bounds)
    return _none(name, value, f"a finite number{', ' if listed else ''}{listed}", optional, also)


def boolean(name: str, value: Any) -> bool:
    """Checks a boolean of Python or NumPy: a string such as "no" would count as true."""
    kind = type(value)
    is_numpys = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    if isinstance(value, bool) or is_numpys:
        return bool(value)
    raise refuse(name, value, "True or False")


def text(name: str, value: Any, *, optional: bool = False) -> Any:
    """Checks a non-empty string without control characters."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return value
    return _none(name, value, "a non-empty string without control characters", optional)


def one_of(name: str, value: Any, choices: Iterable, *, optional: bool = False) -> Any:
    """Checks that a value is one of several."""
    choices = list(choices)
    # By type, too: 1.0 and True equal 1, and a value may have no hash or no `==`.
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    return _none(name, value, f"one of {', '.join(map(repr, choices))}", optional)


def path(name: str, value: Any, *, optional: bool = False) -> Any:
    """Checks a path, which need not exist; returns it as a string."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if isinstance(found, str) and found.strip() and "\0" not in found:
        return found
    return _none(name, value, "a non-empty path", optional)


def instance(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str, *, optional: bool = False
) -> Any:
    """Checks the type of a value; `what` names the types in the message."""
    return value if isinstance(value, kinds) else _none(name, value, what, optional, "", TypeError)


def function(name: str, value: Any, *, optional: bool = False) -> Any:
    """Checks that a value is callable."""
    return value if callable(value) else _none(name, value, "a function", optional, "", TypeError)


def integers(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    none: bool = False,
    optional: bool = False,
    empty: bool = False,
) -> Any:
    """Checks a list or tuple of integers, and returns a tuple.

    `none` allows entries that are None, and `empty` a list without entries.
    """
    each = f"integers{_range(minimum, None)}" + (" or None" if none else "")
    check = functools.partial(integer, name, minimum=minimum, optional=none)
    return _each(name, value, check, each, optional, empty)


def numbers_of(
    name: str, value: Any, *, minimum: float | None = None, above: float | None = None
) -> tuple:
    """Checks a list or tuple of finite numbers, and returns a tuple."""
    each = "finite numbers" + ("" if minimum is None else f" of at least {minimum:,}")
    each += "" if above is None else f" above {above:,}"
    return _each(name, value, functools.partial(number, name, minimum=minimum, above=above), each)


def sequence(name: str, value: Any, what: str) -> Sequence:
    """Checks a list or tuple of any objects; `what` names them in the message."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    raise refuse(name, value, f"a list or tuple of {what}")


def _none(
    name: str,
    value: Any,
    meaning: str,
    optional: bool,
    also: str = "",
    error: type[Exception] = ValueError,
) -> Any:
    """Returns None if that is the value and allowed, and raises otherwise."""
    if value is not None or not optional:
        other = f", or {also}" if also else " or None" if optional else ""
        raise refuse(name, value, meaning + other, error)
    return None


def _each(
    name: str, value: Any, check: Callable, each: str, optional: bool = False, empty: bool = False
) -> Any:
    # A shape may be a tf.TensorShape, and costs an array: anything with a length and an order.
    if hasattr(value, "__len__") and not isinstance(value, str | bytes | dict | set | frozenset):
        with contextlib.suppress(Exception):  # Code of the value may raise any error.
            entries = tuple(value)
            if entries or empty:
                return tuple(map(check, entries))
    words = f"a {'' if empty else 'non-empty '}list or tuple of {each}"
    return _none(name, value, words, optional)


def _range(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    return "" if maximum is None else f" of at most {maximum}"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int that no float can represent.
        return False
