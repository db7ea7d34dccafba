"""Initializers of layers: checks of the argument, and copies for further weights."""

from __future__ import annotations

import keras

from tfdist.utils import checks


def again(initializer):
    """A copy of an initializer for another weight, with a different seed if none was given.

    A Keras initializer draws the same numbers at each call.
    """
    return initializer.clone() if hasattr(initializer, "clone") else initializer


def initializer(name: str, value, *, optional: bool = False):
    """The Keras initializer that is the value of an argument.

    Args:
        name: The name of the argument.
        value: An initializer, its name or its configuration.
        optional: Whether None is allowed.

    Raises:
        ValueError: The value is not an initializer.
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
