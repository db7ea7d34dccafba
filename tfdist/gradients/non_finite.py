"""The guard of a model: a part of its training step that counts losses that are not finite.

`tfdist.callbacks.TerminateOnNonFinite` adds it.
"""

from __future__ import annotations

from typing import Any

#: The attribute of a model for its guard, which is set before the training step is traced.
GUARD = "_tfdist_non_finite_guard"


def guard_of(model) -> Any:
    """The `NonFiniteGuard` that a `TerminateOnNonFinite` has added to a model; None if none was."""
    return getattr(model, GUARD, None)
