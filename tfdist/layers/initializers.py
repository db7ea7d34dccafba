"""Initializers for several weights of one layer."""

from __future__ import annotations

__all__ = ["again"]


def again(initializer):
    """The same initializer for another weight, with a seed of its own where none was given.

    An initializer of Keras draws the same numbers each time that it is called.
    """
    return initializer.clone() if hasattr(initializer, "clone") else initializer
