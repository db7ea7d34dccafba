"""A warning if a model is trained outside the scope of a strategy that was created before."""

from __future__ import annotations

import weakref

import tensorflow as tf
from absl import logging

from tfdist.step.context import DistributedStrategy

_strategies: weakref.WeakSet[DistributedStrategy] = weakref.WeakSet()
_has_warned = False


def record_strategy(strategy: DistributedStrategy) -> None:
    """Records a strategy with several ranks."""
    if strategy.mesh.size > 1:
        _strategies.add(strategy)


def warn_of_no_scope(model) -> None:
    """Logs a warning, once and on the chief, if each rank trains a model separately."""
    global _has_warned
    if _has_warned or model._distribute_strategy is not None or tf.distribute.has_strategy():
        return
    for strategy in _strategies:
        _has_warned = True
        if strategy.is_chief:
            logging.warning(
                "tfdist: `%s` was created outside `strategy.scope()`, so each of the %d ranks trains it "
                "separately, on all rows. Build or load it inside `with strategy.scope():` to divide the "
                "work among the ranks. This warning is logged once.",
                model.name,
                strategy.mesh.size,
            )
        return
