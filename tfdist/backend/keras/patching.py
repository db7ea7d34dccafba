"""Replaces functions of Keras by name, after a check of their signatures."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.runtime.versions import VersionError, range_of

_applied: set[tuple[int, str, int]] = set()


@dataclasses.dataclass(frozen=True)
class Patch:
    """A function of Keras and its replacement.

    Attributes:
        owner: The module or class.
        name: The function's name there.
        parameters: The first parameters that the patch requires.
        call: The replacement, with Keras' own function as the keyword argument `original`.
    """

    owner: object
    name: str
    parameters: tuple[str, ...]
    call: Callable


class Patches(list[Patch]):
    """The patches of a module, each added by the decorator `of`."""

    def of(self, owner: object, name: str, *parameters: str) -> Callable[[Callable], Callable]:
        """Adds a patch; the decorated function is its `call`.

        Args:
            owner: See `Patch`.
            name: See `Patch`.
            *parameters: See `Patch`; none for the named parameters of the decorated function.
        """

        def add(call: Callable) -> Callable:
            named = parameters or tuple(inspect.getfullargspec(call).args)
            self.append(Patch(owner, name, named, call))
            return call

        return add


def apply_patches(patches: Sequence[Patch]) -> None:
    """Replaces each function that is not replaced yet.

    Raises:
        VersionError: Keras has no such function, or its parameters differ.
    """
    for patch in patches:
        key = (id(patch.owner), patch.name, id(patch.call))
        if key in _applied:
            continue
        check_parameters(patch.owner, patch.name, patch.parameters)
        original = getattr(patch.owner, patch.name)
        setattr(patch.owner, patch.name, replacement(original, patch.call))
        _applied.add(key)


def check_parameters(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Checks that Keras has a function with the first parameters that tfdist requires.

    Raises:
        VersionError: There is no such function, or its parameters differ.
    """
    function = getattr(owner, name, None)
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if found[: len(parameters)] != parameters:
        raise moved(f"{owner.__name__}.{name}{parameters}", found or "nothing")


def moved(expected: str, found: object) -> VersionError:
    """The error for a Keras that lacks something that tfdist requires."""
    return VersionError(
        f"This version of tfdist requires `{expected}` of Keras. Received: {found} in Keras "
        f"{keras.__version__}. Install a version with which it was tested: pip install "
        f"'keras{range_of('keras')}'."
    )


def replacement(original: Callable, call: Callable) -> Callable:
    """A copy of `call` with `original` bound, and with the name and the signature of `original`.

    There is no wrapper between the caller and the copy, which keeps tracebacks short.
    """
    function = types.FunctionType(
        call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
    function.__kwdefaults__ = {**(call.__kwdefaults__ or {}), "original": original}
    return functools.update_wrapper(function, original)
