"""Attributes with temporary values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attributes_set(thing: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an object, and restores their previous values on exit."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
