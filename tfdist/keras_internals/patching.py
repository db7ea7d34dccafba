"""How a function of Keras is wrapped: by name, with its signature checked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

__all__ = ["Patch", "apply_patches"]

_applied: set[tuple[int, str, int]] = set()


@dataclasses.dataclass(frozen=True)
class Patch:
    """A function of Keras and what is called in its stead.

    Attributes:
        owner: The module or class.
        name: The function's name there.
        parameters: The first parameters that the patch counts on.
        call: Called as `call(original, *args, **kwargs)`.
    """

    owner: object
    name: str
    parameters: tuple[str, ...]
    call: Callable


def apply_patches(patches: Sequence[Patch]) -> None:
    """Wraps each function that is not wrapped yet.

    Raises:
        ImportError: Keras has no such function, or its parameters are others.
    """
    for patch in patches:
        key = (id(patch.owner), patch.name, id(patch.call))
        if key in _applied:
            continue
        original: Any = getattr(patch.owner, patch.name, None)
        found = tuple(inspect.signature(original).parameters) if callable(original) else ()
        if found[: len(patch.parameters)] != patch.parameters:
            owner = getattr(patch.owner, "__name__", patch.owner)
            raise ImportError(
                f"This tfdist knows another Keras than {keras.__version__}: it relies on "
                f"`{owner}.{patch.name}{patch.parameters}`. Found: {found or 'nothing'}. "
                "Install the Keras that tfdist's metadata asks for."
            )
        setattr(patch.owner, patch.name, _wrapped(original, patch.call))
        _applied.add(key)


def _wrapped(original: Callable, call: Callable) -> Callable:
    @functools.wraps(original)
    def function(*args, **kwargs):
        return call(original, *args, **kwargs)

    return function
