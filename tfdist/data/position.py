"""Where `fit` stands in its data, and how another process gets there.

Each iterator that a `tf.data` set gives out shuffles by the next seed of a sequence, and a set that
repeats goes on within one iterator. So two numbers say where training stands, on any mesh: how many
iterators were made, and how many batches the last one gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.data.random_state import kept_random_state, random_state, set_random_state

__all__ = ["DataPosition"]


class DataPosition:
    """The position in one `fit`.

    Keras' `TFEpochIterator` calls what stands here, through `strategies/keras_seam/data.py`.
    """

    def __init__(self):
        self._source: Any = None
        self._made = 0
        self._random: dict[str, Any] | None = None
        self._resume: tuple[dict[str, Any], int] | None = None
        self._prepared: Any = None

    def state(self, *, in_epoch: bool) -> dict[str, Any]:
        """The position, as JSON can hold it.

        Args:
            in_epoch: Whether a batch is about to be taken, which Keras has counted already.
        """
        source = self._source
        ahead = source.steps_per_execution if in_epoch else 0
        # Keras forgets an iterator that has run out.
        lasts = in_epoch or source._current_iterator is not None
        return {
            "iterators": self._made,
            "taken": source._steps_seen - ahead if lasts else None,
            "batches": source._num_batches,
            "random": self._random,
        }

    def resume(self, state: dict[str, Any], batch: int) -> None:
        """Lets the next epoch begin at a position.

        Args:
            state: What `state` returned.
            batch: How many batches of the epoch are done.
        """
        self._resume = state, batch

    # -- called by Keras' epoch iterator ------------------------------------------------------

    def adopt(self, source) -> bool:
        """Takes the first epoch iterator that is made: the training data's."""
        if self._source is None:
            self._source = source
        return self._source is source

    def dataset(self, original: Callable[[], Any]):
        """What Keras makes an iterator of."""
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            return prepared
        return _Counted(original(), self._count)

    def steps(self, original: Callable[[], Iterator]) -> Iterator:
        """The steps of an epoch: those that are left, in the first after `resume`."""
        if self._resume is None:
            return original()
        (state, batch), self._resume = self._resume, None
        source = self._source
        source._num_batches = state["batches"]
        # Without `steps_per_epoch` every epoch makes an iterator of its own.
        lasts = state["taken"] is not None and bool(batch or source.steps_per_epoch)
        dataset = source._get_iterator()
        for _ in range(state["iterators"] - lasts):
            iter(dataset)
        if not lasts:
            return original()
        with kept_random_state():
            # Data from a Python generator may draw while it is read.
            set_random_state(state["random"])
            iterator = iter(dataset)
            for _ in range(state["taken"]):
                next(iterator)
        if source.steps_per_epoch:
            source._current_iterator = iterator
            source._steps_seen = state["taken"] - batch
        else:
            self._prepared = iterator
        return itertools.islice(original(), batch // source.steps_per_execution, None)

    def _count(self) -> None:
        self._made += 1
        self._random = random_state()


class _Counted:
    """A data set whose iterators are counted."""

    def __init__(self, dataset, count: Callable[[], None]):
        self._dataset, self._count = dataset, count

    def __iter__(self):
        self._count()
        return iter(self._dataset)
