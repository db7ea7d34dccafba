"""`fit` under an asynchronous strategy: what surrounds Keras' own loop."""

from __future__ import annotations

import inspect

import tensorflow as tf

from tfdist.data.sharding import own_batches
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import TensorFlowTrainer, TFEpochIterator
from tfdist.strategies.asynchronous import asynchronous_strategy_of

__all__ = ["PATCHES"]


def _fit(original, self, *args, **kwargs):
    strategy = asynchronous_strategy_of(self)
    if strategy is None:
        return original(self, *args, **kwargs)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    return strategy.fit(lambda arguments: original(**arguments), dict(bound.arguments))


def _evaluate(original, self, *args, **kwargs):
    strategy = asynchronous_strategy_of(self)
    if strategy is not None:
        strategy.before_reading(self)
    return original(self, *args, **kwargs)


def _predict(original, self, *args, **kwargs):
    strategy = asynchronous_strategy_of(self)
    if strategy is not None:
        strategy.before_reading(self)
    return original(self, *args, **kwargs)


def _maybe_symbolic_build(original, self, iterator=None, data_batch=None):
    """From the specification of a batch: to draw one would move a data set that shuffles."""
    if asynchronous_strategy_of(self) is not None and iterator is not None:
        spec = iterator._distributed_dataset.element_spec
        data_batch = tf.nest.map_structure(
            lambda part: None if isinstance(part, tf.NoneTensorSpec) else part, spec
        )
        iterator = None
    return original(self, iterator, data_batch)


def _epoch_iterator(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    share = own_batches(self._distributed_dataset)
    if share is not None:
        self.data_adapter = _OwnBatches(self.data_adapter, *share)
        self._num_batches = self.data_adapter.num_batches


class _OwnBatches:
    """A data adapter of Keras' that counts this worker's batches only."""

    def __init__(self, adapter, num_workers: int, worker: int):
        self._adapter = adapter
        self._num_workers, self._worker = num_workers, worker

    def __getattr__(self, name: str):
        return getattr(self._adapter, name)

    @property
    def num_batches(self) -> int | None:
        """This worker's batches of an epoch; None where it is not known."""
        total = self._adapter.num_batches
        if total is None:
            return None
        if total < self._num_workers:
            raise ValueError(
                f"Each worker takes every {self._num_workers}th batch of an epoch. Received: "
                f"{total} batch(es) for {self._num_workers} workers. Take smaller batches, or fewer "
                "workers."
            )
        return len(range(self._worker, total, self._num_workers))


PATCHES = (
    Patch(TensorFlowTrainer, "fit", ("self", "x", "y"), _fit),
    Patch(TensorFlowTrainer, "evaluate", ("self", "x", "y"), _evaluate),
    Patch(TensorFlowTrainer, "predict", ("self", "x"), _predict),
    Patch(
        TensorFlowTrainer,
        "_maybe_symbolic_build",
        ("self", "iterator", "data_batch"),
        _maybe_symbolic_build,
    ),
    Patch(TFEpochIterator, "__init__", ("self", "distribute_strategy"), _epoch_iterator),
)
