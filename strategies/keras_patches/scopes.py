"""One line where a model is trained outside of the scope of the strategy that was made for it."""

from __future__ import annotations

import weakref

import tensorflow as tf
from absl import logging

from tfdist.step.context import DistributedStrategy

_strategies: weakref.WeakSet[DistributedStrategy] = weakref.WeakSet()
_said = False


def note_strategy(strategy: DistributedStrategy) -> None:
    """Remembers that this process has a strategy of several ranks."""
    if strategy.mesh.size > 1:
        _strategies.add(strategy)


def notice_no_scope(model) -> None:
    """Says so where each rank trains a model for itself: on the chief, the first time."""
    global _said
    if _said or model._distribute_strategy is not None or tf.distribute.has_strategy():
        return
    for strategy in _strategies:
        _said = True
        if strategy.is_chief:
            logging.warning(
                "tfdist: `%s` was made outside of `strategy.scope()`, so each of the %d ranks trains it "
                "by itself, on all rows. Build it, or load it, inside `with strategy.scope():` for the "
                "ranks to share the work. This is said once.",
                model.name,
                strategy.mesh.size,
            )
        return
