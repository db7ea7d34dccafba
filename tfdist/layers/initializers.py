"""Initializers: those that a layer is given, and one for several of its weights."""

from __future__ import annotations

import keras

from tfdist.utils import checks


def again(initializer):
    """The same initializer for another weight, with a seed of its own where none was given.

    An initializer of Keras draws the same numbers each time that it is called.
    """
    return initializer.clone() if hasattr(initializer, "clone") else initializer


def initializer(name: str, value, *, optional: bool = False):
    """The initializer that an argument stands for.

    Args:
        name: The argument.
        value: An initializer, its name or its configuration.
        optional: Whether None is allowed, too.

    Raises:
        ValueError: It is none.
    """
    if value is None and optional:
        return None
    error = checks.refuse(
        name, value, f"an initializer of Keras, or its name{' or None' if optional else ''}"
    )
    try:
        found = keras.initializers.get(value)
    except (ValueError, TypeError, AttributeError) as cause:
        raise error from cause
    if not callable(found):
        raise error
    return found
