"""Saving: every rank calls it, the chief alone writes, and all go on when the file is there."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.collectives import barrier
from tfdist.strategies.keras_seam.wrapping import Wrapper

__all__ = ["WRAPPERS"]


def _write_once(original, self, *args, **kwargs):
    strategy: Any = getattr(self, "distribute_strategy", None)
    if not hasattr(strategy, "engine") or strategy.group().size == 1:
        return original(self, *args, **kwargs)
    from tfdist.strategies.keras_seam.synchronization import synchronize_layer_states

    synchronize_layer_states(self)
    result = original(self, *args, **kwargs) if strategy.is_chief else None
    barrier(strategy.group(), name="saved")
    return result


WRAPPERS = (
    Wrapper(keras.Model, "save", ("self", "filepath"), _write_once),
    Wrapper(keras.Model, "save_weights", ("self", "filepath"), _write_once),
    Wrapper(keras.Model, "export", ("self", "filepath"), _write_once),
)
