"""Losses over a whole batch: those of Keras receive the rows of all ranks; others may cause a warning."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.backend.keras.attributes import loss_arguments, metric_arguments, metric_function
from tfdist.backend.keras.patching import Patches
from tfdist.layers.whole_batch import all_rows, compares_rows, is_declared
from tfdist.step.context import current_replica
from tfdist.utils.temporary import attributes_set

PATCHES = Patches()

_logger = logging.getLogger("tfdist")


class _Local(threading.local):
    #: The current loss or metric, and the number of gathers before it.
    source: Any = None
    gathers: int = 0
    is_of_whole_batch: bool = False


_local = _Local()
_warned: set[str] = set()


def of_whole_batch() -> bool:
    """Whether the current loss is computed from the rows of all ranks, so that all have its value."""
    return _local.is_of_whole_batch


def warn_of_scalar(values) -> None:
    """Logs a warning, once, for a custom function that returns one number for a batch.

    Args:
        values: Its return value.
    """
    source, replica = _local.source, current_replica()
    if source is None or replica is None or len(getattr(values, "shape", (None,))):
        return
    is_known = is_declared(source) or getattr(source, "__module__", "").startswith("keras.")
    # A function that has gathered rows has the value of all of them.
    if is_known or replica.num_gathers > _local.gathers or not replica.strategy.is_chief:
        return
    name = str(getattr(source, "__name__", None) or getattr(source, "name", type(source).__name__))
    if name not in _warned:
        _warned.add(name)
        _logger.warning(
            "`%s` returns one value for a batch, of which each rank has some rows: the mean of the ranks' "
            "values is used. If it is a mean over rows, declare it with tfdist.layers.mean_of_rows(%s). "
            "Otherwise tfdist.layers.over_batch(%s) passes the rows of the whole batch to it.",
            name,
            name,
            name,
        )


@PATCHES.of(keras.losses.Loss, "__call__")
def _call_loss(self, y_true, y_pred, sample_weight=None, *, original):
    function = getattr(self, "fn", None)
    source, arguments = self if function is None else function, loss_arguments(self, {})
    with _samples(source, function, arguments, (y_true, y_pred, sample_weight)) as samples:
        return original(self, *samples)


@PATCHES.of(keras.metrics.MeanMetricWrapper, "update_state")
def _update_metric(self, y_true, y_pred, sample_weight=None, *, original):
    function, arguments = metric_function(self), metric_arguments(self)
    with _samples(function, function, arguments, (y_true, y_pred, sample_weight)) as samples:
        return original(self, *samples)


@contextlib.contextmanager
def _samples(source: Any, function: Any, arguments: dict, samples: tuple) -> Iterator[tuple]:
    """The samples for a loss or metric: in a Keras step, those of all ranks if it compares rows."""
    replica = current_replica()
    if replica is None or replica.step is None:
        yield samples
        return
    is_whole = compares_rows(function, arguments)
    if is_whole:
        samples = all_rows(samples)
    gathers = replica.num_gathers
    with attributes_set(_local, source=source, gathers=gathers, is_of_whole_batch=is_whole):
        yield samples
