"""The guard of a model: a part of its training step that counts losses that are not finite.

`tfdist.callbacks.TerminateOnNonFinite` adds it.
"""

from __future__ import annotations

from typing import Any

_GUARD = "_tfdist_non_finite_guard"


def guard_of(model) -> Any:
    """The `NonFiniteGuard` that a `TerminateOnNonFinite` has added to a model; None if none was."""
    return getattr(model, _GUARD, None)


def put_guard(model, guard) -> None:
    """Adds a guard to a model, whose training step has not been traced yet."""
    setattr(model, _GUARD, guard)
