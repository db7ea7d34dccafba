"""Checks of what a caller passes: each returns the value, or raises with one line.

The line names the argument and shows the value. TensorFlow and Keras say what is wrong with a value
where they stumble over it, often far from the call that brought it. Nothing here needs either.

The arguments of the checks mean the same everywhere: `name` is the argument that is checked, `value`
what was passed, `minimum` and `maximum` the bounds that it may reach, `above` and `below` those that it
may not. `optional` allows None too, and `also` says for the message what None or another value means.
The error is a TypeError for an object of another kind, and else a ValueError.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: The largest integer that is taken where no other limit is given: what fits into an int32.
LARGEST = 2**31 - 1
#: Longer than any wait that a program is asked for.
YEAR_SECONDS = 366 * 24 * 3600
_SHOWN_CHARACTERS = 80


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
    """A text on one line; a longer one ends after a whole word, and says so by " ..."."""
    words = " ".join(str(text).split())
    if len(words) <= most:
        return words
    if " " not in words[: most - 3]:
        return f"{words[: most - 4]} ..."
    return textwrap.shorten(words, most, placeholder=" ...")


def refuse(name: str, value: Any, meaning: str, error: type[Exception] = ValueError) -> Exception:
    """The exception for a bad value; `meaning` goes on behind the argument's name."""
    return error(f"`{name}` is {meaning}. Received: {name}={shown(value)}.")


def integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    optional: bool = False,
    also: str = "",
) -> Any:
    """Checks an integer, at most `LARGEST` by default; those of NumPy are some, booleans are none."""
    if value is None and optional:
        return None
    most = LARGEST if maximum is None else maximum
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_integer and (minimum is None or value >= minimum) and value <= most:
        return int(value)
    too_large = is_integer and value > most
    meaning = f"an int{_range(minimum, most if too_large or maximum is not None else None)}"
    raise refuse(name, value, meaning + _or_none(optional, also))


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
    if value is None and optional:
        return None
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        found = int(value) if isinstance(value, numbers.Integral) else float(value)
        if (
            _is_finite(found)
            and (minimum is None or found >= minimum)
            and (maximum is None or found <= maximum)
            and (above is None or found > above)
            and (below is None or found < below)
        ):
            return found
    bounds = [
        f"{words} {bound:,}"
        for words, bound in (
            ("at least", minimum),
            ("above", above),
            ("at most", maximum),
            ("below", below),
        )
        if bound is not None
    ]
    meaning = f"a finite number{', ' if bounds else ''}{' and '.join(bounds)}"
    raise refuse(name, value, meaning + _or_none(optional, also))


def boolean(name: str, value: Any) -> bool:
    """Checks a truth value: a text such as "no" would count as true."""
    kind = type(value)
    is_numpys = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    if isinstance(value, bool) or is_numpys:
        return bool(value)
    raise refuse(name, value, "True or False")


def text(name: str, value: Any, *, optional: bool = False, also: str = "") -> Any:
    """Checks a text that is not empty, and that has no control characters."""
    if value is None and optional:
        return None
    if isinstance(value, str) and value.strip() and value.isprintable():
        return value
    raise refuse(
        name, value, "a text, not empty and without control characters" + _or_none(optional, also)
    )


def one_of(name: str, value: Any, choices: Iterable, *, optional: bool = False) -> Any:
    """Checks that a value is among some."""
    choices = list(choices)
    # By type, too: 1.0 and True equal 1, and a value that has no hash or no `==` is none of them.
    if (value is None and optional) or any(
        type(value) is type(choice) and value == choice for choice in choices
    ):
        return value
    listed = ", ".join(map(repr, choices))
    raise refuse(name, value, f"one of {listed}{' or None' if optional else ''}")


def path(name: str, value: Any, *, optional: bool = False, also: str = "") -> Any:
    """Checks a path, which is not looked for; returns it as a text."""
    if value is None and optional:
        return None
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if isinstance(found, str) and found.strip() and "\0" not in found:
        return found
    raise refuse(name, value, "a path, not empty" + _or_none(optional, also))


def instance(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str, *, optional: bool = False
) -> Any:
    """Checks what kind of object a value is; `what` names the kinds in the message."""
    if (value is None and optional) or isinstance(value, kinds):
        return value
    raise refuse(name, value, what + _or_none(optional, ""), TypeError)


def function(name: str, value: Any, *, optional: bool = False) -> Any:
    """Checks that a value can be called."""
    if (value is None and optional) or callable(value):
        return value
    raise refuse(name, value, "a function" + _or_none(optional, ""), TypeError)


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

    `none` allows an entry to be None, and `empty` a list without entries.
    """
    each = f"integers{_range(minimum, None)}" + (" or None" if none else "")
    return _each(
        name,
        value,
        lambda entry: integer(name, entry, minimum=minimum, optional=none),
        each,
        optional,
        empty,
    )


def numbers_of(
    name: str, value: Any, *, minimum: float | None = None, above: float | None = None
) -> tuple:
    """Checks a list or tuple of finite numbers, and returns a tuple."""
    each = "finite numbers" + ("" if minimum is None else f" of at least {minimum:,}")
    each += "" if above is None else f" above {above:,}"
    found = _each(
        name,
        value,
        lambda entry: number(name, entry, minimum=minimum, above=above),
        each,
        False,
        False,
    )
    return found or ()


def _each(
    name: str, value: Any, check: Callable, what: str, optional: bool, empty: bool
) -> tuple | None:
    if value is None and optional:
        return None
    # A shape may be a tf.TensorShape, and costs an array: anything with a length and an order.
    if not isinstance(value, str | bytes | dict | set | frozenset):
        try:
            entries = tuple(value) if hasattr(value, "__len__") else ()
        except Exception:  # Whatever the value's own code raises: it is no list.
            entries, empty = (), False
        with contextlib.suppress(ValueError):
            if entries or (empty and hasattr(value, "__len__")):
                return tuple(check(entry) for entry in entries)
    meaning = f"a list or tuple of {what}{'' if empty else ', not empty'}"
    raise refuse(name, value, meaning + _or_none(optional, ""))


def _range(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    return "" if maximum is None else f" of at most {maximum}"


def _or_none(optional: bool, also: str) -> str:
    if also:
        return f", or {also}"
    return " or None" if optional else ""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int that no float can hold.
        return False


def sequence(name: str, value: Any, what: str) -> Sequence:
    """Checks a list or tuple of anything."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    raise refuse(name, value, f"a list or tuple of {what}")
