"""The root of tfdist's own errors."""

from __future__ import annotations


class TfdistError(Exception):
    """What tfdist raises where no error of Python's own says it: `except TfdistError` catches all.

    A wrong argument is a `ValueError` or a `TypeError`, as everywhere in Python.
    """
