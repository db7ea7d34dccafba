"""Metrics that are read anywhere: in a callback, after `evaluate`, or in a custom loop.

Functions of `strategy.run` and steps of Keras count on each rank separately, and `result` reduces the counts.
Every class of metrics defines `result`, so each class is patched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import replacement
from tfdist.backend.keras.private import in_stateless_scope
from tfdist.step.context import DistributedStrategy, current_replica, strategy_of
from tfdist.strategies.keras_patches.counting import Counting, states_on_read


@dataclasses.dataclass(eq=False)
class _Record:
    """The updates of a metric.

    Attributes:
        strategy: The strategy whose ranks count in it.
        model: Its model, if it has one.
        is_counted_outside: Whether it was updated outside `strategy.run` since it was reset.
        reset_at: The number of calls of `strategy.run` before it was reset.
        read_at: The number of calls of `strategy.run` before its states were reduced last.
        states: The reduced states.
    """

    strategy: DistributedStrategy
    model: weakref.ref | None = None
    is_counted_outside: bool = False
    reset_at: int = -1
    read_at: int = -1
    states: list = dataclasses.field(default_factory=list)


class _Local(threading.local):
    def __init__(self):
        self.running: set[int] = set()


_local = _Local()
_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_patched: weakref.WeakSet = weakref.WeakSet()


def bind_metrics(model: keras.Model) -> None:
    """Records that the metrics of a model are counted in its steps, including those of other ranks."""
    strategy = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return
    for metric in model.metrics:
        record = _records.setdefault(metric, _Record(strategy))
        record.strategy, record.model = strategy, weakref.ref(model)


def keep_states(metrics: Sequence, variables: Sequence, states: Sequence) -> None:
    """Records the states of metrics that were reduced outside a step."""
    found = {id(variable): state for variable, state in zip(variables, states, strict=True)}
    for metric in metrics:
        record = _records.get(metric)
        if record is not None and tf.executing_eagerly():
            record.read_at = record.strategy.extended.num_runs()
            record.states = [found[id(variable)] for variable in states_on_read([metric])]


def _update(self, *args, original: Callable, **kwargs):
    with _outermost(self) as is_outermost:
        if is_outermost:
            _record_update(self)
        return original(self, *args, **kwargs)


def _record_update(metric) -> None:
    replica = current_replica()
    if replica is not None:
        if replica.strategy.mesh.size > 1:
            _records.setdefault(metric, _Record(replica.strategy)).strategy = replica.strategy
    elif (record := _records.get(metric)) is not None and not in_stateless_scope():
        record.is_counted_outside = True


def _reset(self, *args, original: Callable, **kwargs):
    record = _records.get(self)
    if record is not None and tf.executing_eagerly():
        runs = record.strategy.extended.num_runs()
        _records[self] = _Record(record.strategy, record.model, reset_at=runs)
    return original(self, *args, **kwargs)


def _result(self, *args, original: Callable, **kwargs):
    with _outermost(self) as is_outermost:
        if not is_outermost:
            return original(self, *args, **kwargs)
        if in_stateless_scope():
            return _without_variables(original(self, *args, **kwargs))
        record, replica = _records.get(self), current_replica()
        # A function of `strategy.run` reads the state of its replica, as in TensorFlow.
        if record is None or (replica is not None and replica.step is None):
            return original(self, *args, **kwargs)
        variables = states_on_read([self])
        states = _global_states(self, record, variables)
        if states is None:
            return original(self, *args, **kwargs)
        with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))):
            return _without_variables(original(self, *args, **kwargs))


def _global_states(metric, record: _Record, variables: Sequence) -> Sequence | None:
    """The states over all ranks; None if they are those of this rank."""
    counting = Counting(None if record.model is None else record.model(), record.strategy)
    if counting.group.size == 1 or not variables:
        return None
    if not tf.executing_eagerly():
        return counting.reduce(variables, metric.name)
    runs = record.strategy.extended.num_runs()
    if runs == record.reset_at:
        return None
    if record.is_counted_outside:
        raise ValueError(
            "A metric must be updated either in `strategy.run` and steps of Keras, where the counts of the "
            "ranks are added up, or outside of them, where each rank counts everything. Received: the metric "
            f"`{metric.name}`, which was updated in both since it was reset. Use two metrics, or call "
            "`reset_state` in between."
        )
    if runs != record.read_at:
        record.states, record.read_at = counting.reduce(variables, metric.name), runs
    return record.states


def _without_variables(result: Any) -> Any:
    """A result whose variables are read now, before they have the values of this rank again."""
    return tf.nest.map_structure(
        lambda part: tf.convert_to_tensor(part.value) if isinstance(part, keras.Variable) else part,
        result,
    )


@contextlib.contextmanager
def _outermost(metric) -> Iterator[bool]:
    """Yields whether a method of a metric was not called by another method of the same metric."""
    key = id(metric)
    if key in _local.running:
        yield False
        return
    _local.running.add(key)
    try:
        yield True
    finally:
        _local.running.discard(key)


_METHODS = {"result": _result, "update_state": _update, "reset_state": _reset}


def install() -> None:
    """Patches the methods of all classes of metrics, including classes that are defined later."""
    metric = keras.metrics.Metric
    if metric in _patched:
        return
    before = metric.__init_subclass__

    def patch(cls, **kwargs):
        before(**kwargs)
        _patch(cls)

    metric.__init_subclass__ = classmethod(patch)
    waiting = [metric]
    while waiting:
        cls = waiting.pop()
        _patch(cls)
        waiting += cls.__subclasses__()


def _patch(cls: type) -> None:
    if cls in _patched:
        return
    _patched.add(cls)
    for name, call in _METHODS.items():
        original = vars(cls).get(name)
        if callable(original):
            setattr(cls, name, replacement(original, call))
