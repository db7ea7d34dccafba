"""The position of `fit` in its data, and how to restore it in another process.

Each new iterator of a `tf.data` dataset shuffles with the next seed of a sequence, and a dataset that repeats
continues within one iterator. So two numbers determine the position on any mesh: the number of created
iterators, and the number of batches drawn from the last one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.backend.keras import attributes
from tfdist.data.random_state import kept_random_state, random_state, set_random_state
from tfdist.data.sharding import global_rows, remaining_batches


@dataclasses.dataclass(frozen=True)
class _Resume:
    """The position at which the next epoch begins.

    Attributes:
        state: The saved state.
        batch: The number of batches that are done.
        in_epoch: Whether the state was saved in the middle of an epoch.
        samples: The number of samples that are done, if the batch size has changed; otherwise None.
        rows: The new batch size.
    """

    state: dict[str, Any]
    batch: int
    in_epoch: bool
    samples: int | None = None
    rows: int = 0


class DataPosition:
    """The position in one `fit`.

    Keras' `TFEpochIterator` calls it through `strategies/keras_patches/data.py`.

    Attributes:
        batch_size: The number of samples of a global batch, if the dataset does not have it.
        done_before: The number of batches of this epoch that an earlier run did.
        put_back: Called once when a resumed epoch begins in its middle, after all `on_epoch_begin`.
        order: The order of a `PyDataset`, a `py_datasets.BatchOrder`; None for other data.
    """

    batch_size: int | None = None
    done_before: int = 0
    put_back: Callable[[], None] | None = None
    order: Any = None

    def __init__(self):
        self._source: Any = None
        self._made = 0
        #: Samples of the current iterator in addition to whole batches, drawn with another batch size.
        self._more_samples = 0
        self._random: dict[str, Any] | None = None
        self._resume: _Resume | None = None
        self._prepared: Any = None

    def state(self, batch: int) -> dict[str, Any]:
        """The position, JSON-serializable.

        Args:
            batch: The number of batches of the epoch that are done. If there are some, another execution is
                about to begin, which Keras has counted already.
        """
        source, taken = self._source, batch
        if source.steps_per_epoch:
            taken = attributes.steps_seen(source) - (source.steps_per_execution if batch else 0)
        # Keras drops an exhausted iterator.
        lasts = batch or attributes.current_iterator(source) is not None
        return {
            "iterators": self._made,
            "taken": taken if lasts else None,
            "batches": attributes.num_batches(source),
            "batch_size": self._rows(),
            "more_samples": self._more_samples,
            "random": self._random,
            "can_skip": self.order is not None and self.order.can_skip,
        }

    def resume(self, state: dict[str, Any], batch: int) -> int:
        """Makes the next epoch begin at a position.

        Args:
            state: A result of `state`.
            batch: The number of batches of the epoch that are done.

        Returns:
            This number in batches of the current size.
        """
        before, now, more = state["batch_size"], self._rows(), state["more_samples"]
        if not before or not now or (before == now and not more):
            self._resume = _Resume(state, batch, batch > 0)
            return batch
        taken = state["taken"]
        samples = None if taken is None else taken * before + more
        state = {**state, "batches": None, "taken": None if samples is None else samples // now}
        done = (batch * before + more) // now
        self._resume = _Resume(state, done, batch > 0, samples, now)
        return done

    # Called by Keras' epoch iterator.

    def adopt(self, source) -> bool:
        """Adopts the first epoch iterator, that of the training data; returns whether it is this one."""
        if self._source is None:
            self._source = source
        return self._source is source

    def dataset(self, original: Callable[[], Any]):
        """The dataset or iterator that Keras iterates over."""
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            return prepared
        return self._counted(original())

    def steps(self, original: Callable[[], Iterator]) -> Iterator:
        """The steps of an epoch; in the first after `resume`, the remaining ones."""
        self.done_before = 0
        if self._resume is None:
            return original()
        resume, self._resume = self._resume, None
        self.done_before = resume.batch
        if resume.batch and self.put_back is not None:
            self.put_back()
        state, source = resume.state, self._source
        # The data may have grown.
        attributes.num_batches.set(source, attributes.num_batches(source) or state["batches"])
        # Without `steps_per_epoch` every epoch creates a new iterator.
        lasts = state["taken"] is not None and bool(resume.in_epoch or source.steps_per_epoch)
        rows = global_rows(attributes.distributed_dataset(source))
        dataset = attributes.get_iterator(source)() if rows is None else self._counted(rows.indices)
        for _ in range(state["iterators"] - lasts):
            iter(dataset)
        if not lasts:
            return original()
        with kept_random_state():
            # A Python generator may draw random numbers while it is read.
            set_random_state(state["random"])
            if resume.samples is not None:
                data = attributes.distributed_dataset(source)
                rest = remaining_batches(data, resume.samples, resume.rows)
                self._count()
                self._more_samples = resume.samples % resume.rows
                iterator = iter(self._distributed(rest))
            elif rows is not None:
                rest = rows.over(rows.indices.skip(state["taken"])).dataset()
                iterator = iter(self._counted(self._distributed(rest)))
            else:
                drawn = state["taken"]
                if drawn and self.order is not None and state.get("can_skip"):
                    self.order.skip(drawn)
                    drawn = 0
                iterator = iter(dataset)
                self._random = state["random"]  # That of the order.
                for _ in range(drawn):
                    next(iterator)
        # Executions of another length than before do not begin where those of a whole epoch do.
        length = source.steps_per_execution
        batches = source.steps_per_epoch or attributes.num_batches(source) or resume.batch
        skipped = -(-batches // length) - -((resume.batch - batches) // length)
        ahead = resume.batch - skipped * length
        if source.steps_per_epoch:
            attributes.current_iterator.set(source, iterator)
            attributes.steps_seen.set(source, state["taken"] - skipped * length)
        else:
            self._prepared = iterator
        steps = itertools.islice(original(), skipped, None)
        return ((begin + ahead, end + ahead, each) for begin, end, each in steps)

    def _rows(self) -> int | None:
        """The number of samples of a global batch; None if it is unknown."""
        rows = global_rows(attributes.distributed_dataset(self._source))
        own = None if rows is None else rows.batch_size
        return self.batch_size or own or self._source.data_adapter.batch_size

    def _distributed(self, dataset):
        return attributes.data_strategy(self._source).experimental_distribute_dataset(dataset)

    def _counted(self, dataset) -> _Counted:
        return _Counted(dataset, self._count)

    def _count(self) -> None:
        self._made += 1
        self._more_samples = 0
        self._random = random_state()


class _Counted:
    """A dataset whose iterators are counted."""

    def __init__(self, dataset, count: Callable[[], None]):
        self._dataset, self._count = dataset, count

    def __iter__(self):
        self._count()
        return iter(self._dataset)
