"""The base class of tfdist's own errors."""

from __future__ import annotations


class TfdistError(Exception):
    """Base class of the errors for which Python has no exception: `except TfdistError` catches all.

    A wrong argument raises `ValueError` or `TypeError`, as usual in Python.
    """
