"""Losses over a whole batch: Keras' own are given the rows of all ranks, and others are asked about."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.backend.keras.attributes import loss_arguments, metric_arguments, metric_function
from tfdist.backend.keras.patching import Patch
from tfdist.layers.whole_batch import all_rows, compares_rows, is_declared
from tfdist.step.context import current_replica, current_step

_logger = logging.getLogger("tfdist")


class _Local(threading.local):
    #: What computes a loss or a metric now, and whether it has gathered rows.
    source: Any = None
    gathers: int = 0
    is_of_whole_batch: bool = False


_local = _Local()
_noticed: set[str] = set()


def of_whole_batch() -> bool:
    """Whether a loss is computed from the rows of all ranks, so that its value is everybody's."""
    return _local.is_of_whole_batch


def notice_scalar(values) -> None:
    """Warns once of a function of the user's own whose value for a batch is one number.

    Args:
        values: What it has returned.
    """
    source, replica = _local.source, current_replica()
    if source is None or replica is None or len(getattr(values, "shape", (None,))):
        return
    is_known = is_declared(source) or getattr(source, "__module__", "").startswith("keras.")
    # What has gathered rows by itself is of all of them.
    if is_known or replica.num_gathers > _local.gathers or not replica.strategy.is_chief:
        return
    name = str(getattr(source, "__name__", None) or getattr(source, "name", type(source).__name__))
    if name not in _noticed:
        _noticed.add(name)
        _logger.warning(
            "`%s` has one value for a batch, of which each rank has some rows: the mean of the ranks' "
            "values is used. If it is a mean over rows, say so by tfdist.layers.mean_of_rows(%s); else "
            "tfdist.layers.over_batch(%s) gives it the rows of the whole batch.",
            name,
            name,
            name,
        )


@contextlib.contextmanager
def _computing(source: Any, *, of_whole_batch: bool) -> Iterator[None]:
    replica = current_replica()
    before = _local.source, _local.gathers, _local.is_of_whole_batch
    _local.source = source
    _local.gathers = 0 if replica is None else replica.num_gathers
    _local.is_of_whole_batch = of_whole_batch
    try:
        yield
    finally:
        _local.source, _local.gathers, _local.is_of_whole_batch = before


def _call_loss(self, y_true, y_pred, sample_weight=None, *, original):
    if current_step() is None:
        return original(self, y_true, y_pred, sample_weight)
    function = getattr(self, "fn", None)
    is_whole = compares_rows(function, loss_arguments(self, {}))
    if is_whole:
        y_true, y_pred, sample_weight = all_rows((y_true, y_pred, sample_weight))
    source = self if function is None else function
    with _computing(source, of_whole_batch=is_whole):
        return original(self, y_true, y_pred, sample_weight)


def _update_metric(self, y_true, y_pred, sample_weight=None, *, original):
    if current_step() is None:
        return original(self, y_true, y_pred, sample_weight)
    function = metric_function(self)
    is_whole = compares_rows(function, metric_arguments(self))
    if is_whole:
        y_true, y_pred, sample_weight = all_rows((y_true, y_pred, sample_weight))
    with _computing(function, of_whole_batch=is_whole):
        return original(self, y_true, y_pred, sample_weight)


PATCHES = (
    Patch(keras.losses.Loss, "__call__", ("self", "y_true", "y_pred", "sample_weight"), _call_loss),
    Patch(
        keras.metrics.MeanMetricWrapper,
        "update_state",
        ("self", "y_true", "y_pred", "sample_weight"),
        _update_metric,
    ),
)
