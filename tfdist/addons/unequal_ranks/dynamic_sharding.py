"""Dynamic sharding of data: each rank requests the next file when it has finished one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.unequal_ranks.work_queue import Books, Clerk, Desk
from tfdist.data.sharding import empty_batch, mark_length_varies, with_unknown_rows
from tfdist.sharding.kept import KeptState
from tfdist.step.context import DistributedStrategy
from tfdist.utils import checks

#: The first rank holds the order of an epoch in memory.
_MOST_ITEMS = 10_000_000
#: Whether other ranks have another batch.
_NOT_KNOWN, _ENDS, _GOES_ON = -1, 0, 1
#: A rank without further items repeats its request after a pause, which doubles.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.1


class DynamicSharding(KeptState):
    """Shards files, or ranges of rows, dynamically: each rank requests the next when it is free.

    ```python
    files = sorted(glob.glob("train-*.tfrecord"))
    shards = tfdist.addons.unequal_ranks.DynamicSharding(files, strategy, shuffle_seed=1)


    def own(context):
        return shards.dataset().flat_map(tf.data.TFRecordDataset).map(parse).batch(32)


    model.fit(shards.distribute(own), epochs=3)
    ```

    In each epoch every item is assigned to exactly one rank. Ranks without further items continue with
    empty batches until all have finished. Ranks that compute the same rows, such as those of a tensor
    axis, get the same items. All ranks must create the object at the same time.

    A `Checkpointer` saves the items that each rank had, so that an epoch continues with the others; that
    requires the same number of ranks, and a `dataset()` that is not repeated.

    Args:
        items: Paths, or other strings; or a number of rows, in ranges of `chunk`.
        strategy: A strategy of ranks.
        chunk: The number of rows of a range; the last one may have fewer.
        shuffle_seed: The seed of the order of items, which differs between epochs; None to keep the
            order.

    Raises:
        ValueError: An argument is out of range.
        OSError: The first rank, which assigns the items, cannot be reached.
    """

    name = "dynamic_sharding"

    def __init__(
        self,
        items: Sequence[str] | int,
        strategy: DistributedStrategy,
        *,
        chunk: int = 1,
        shuffle_seed: int | None = None,
    ):
        chunk = checks.integer("chunk", chunk, minimum=1)
        checks.integer("shuffle_seed", shuffle_seed, minimum=0, optional=True)
        self._values, self._spec = _values_of(items, chunk)
        checks.instance("strategy", strategy, DistributedStrategy, "a strategy of tfdist, of ranks")
        self._strategy = strategy
        engine, group = strategy.engine, strategy.row_group
        takers = [0] * engine.size
        for taker, rank in _ranks_by_rows(strategy):
            takers[rank] = taker
        self._desk: Desk | None = None
        if strategy.is_chief:
            books = Books(len(self._values), group.size, shuffle_seed)
            self._desk = Desk(books, engine, takers)
        self._clerk = Clerk(engine, self._desk)
        self._epoch = -1
        strategy.keep(self)

    def dataset(self) -> tf.data.Dataset:
        """The items of this rank in an epoch.

        Returns:
            A dataset of scalar strings, or of ranges [begin, end): int64 of shape [2]. Each iterator is
            an epoch; only one may be read at a time.
        """
        return tf.data.Dataset.from_generator(self._items, output_signature=self._spec)

    def distribute(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]):
        """Returns a distributed dataset, for `fit`, `evaluate`, and custom loops.

        Args:
            dataset_fn: Makes this rank's batches of `dataset()`, as for
                `distribute_datasets_from_function`.

        Raises:
            ValueError: `dataset_fn` cannot be called, or its batches are not dense tensors.
        """
        checks.function("dataset_fn", dataset_fn)
        return self._strategy.distribute_datasets_from_function(
            lambda context: self._until_all_end(dataset_fn(context))
        )

    def values(self, *, in_epoch: bool) -> dict[str, Any] | None:
        """The state for a checkpoint, on the first rank.

        Args:
            in_epoch: Whether the epoch is to be continued.
        """
        if self._desk is None or self._epoch < 0:
            return None
        taken = self._desk.state(self._epoch) if in_epoch else None
        return {"epoch": self._epoch if in_epoch else self._epoch + 1, "taken": taken}

    def restore(self, values: dict[str, Any] | None) -> None:
        """Restores the state of `values`.

        Raises:
            ValueError: It was saved with another number of ranks, or of items.
        """
        if values is None:
            return
        epoch, taken, takers = values["epoch"], values["taken"], self._strategy.row_group.size
        if taken is not None:
            fits = len(taken) == takers and all(
                type(item) is int and 0 <= item < len(self._values)
                for each in taken
                for item in each
            )
            if not fits:
                raise ValueError(
                    "DynamicSharding can only resume mid-epoch on the same number of ranks. "
                    f"Received: {takers} rank(s) with other rows and {len(self._values)} items, and a "
                    f"checkpoint of {len(taken)} rank(s). Use the same number of ranks and the same items, "
                    "or a checkpoint at the end of an epoch."
                )
        self._epoch = epoch - 1
        if taken is not None and self._desk is not None:
            self._desk.restore(epoch, taken)

    def _items(self) -> Iterator:
        self._epoch += 1
        epoch, number = self._epoch, 0
        while (item := self._clerk.take(epoch, number)) is not None:
            yield self._values[item]
            number += 1

    def _until_all_end(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The batches, followed by empty ones until no rank has another."""
        dataset = with_unknown_rows(dataset)
        is_tuple = type(dataset.element_spec) is tuple
        own = dataset.map(lambda *batch: (batch if is_tuple else batch[0], True))
        empty = tf.data.Dataset.from_tensors((empty_batch(dataset.element_spec), False))
        steps = own.concatenate(empty.repeat()).enumerate()

        def goes_on(step, element):
            # A loop of calls: an iterator that is discarded ends the loop, but waits for a single call.
            _, found = tf.while_loop(
                lambda _, found: found == _NOT_KNOWN,
                lambda asked, _: (asked + 1, self._ask(step, element[1], asked)),
                (tf.constant(0), tf.constant(_NOT_KNOWN)),
            )
            return found == _GOES_ON

        return mark_length_varies(steps.take_while(goes_on).map(lambda _, element: element[0]))

    def _ask(self, step: tf.Tensor, is_own: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        found = tf.numpy_function(self._goes_on, [step, is_own, asked], tf.int32)
        found.set_shape([])
        return found

    def _goes_on(self, step: np.int64, is_own: np.bool_, asked: np.int32) -> np.int32:
        if is_own:
            self._clerk.made(self._epoch, int(step) + 1)
            return np.int32(_GOES_ON)
        if asked:
            doubled = _FIRST_PAUSE_SECONDS * 2.0 ** min(int(asked) - 1, 10)
            time.sleep(min(doubled, _LONGEST_PAUSE_SECONDS))
        found = self._clerk.goes_on(self._epoch, int(step))
        return np.int32(_NOT_KNOWN if found is None else _GOES_ON if found else _ENDS)


def _values_of(items: Any, chunk: int) -> tuple[Sequence, tf.TensorSpec]:
    """The items, and their spec in a dataset."""
    if isinstance(items, int | np.integer) and not isinstance(items, bool):
        rows = checks.integer("items", items, minimum=1)
        if -(-rows // chunk) > _MOST_ITEMS:
            raise checks.refuse(
                "items", items, f"a number of rows in at most {_MOST_ITEMS:,} ranges of `chunk`"
            )
        begins = np.arange(0, rows, chunk, dtype=np.int64)
        bounds = np.stack([begins, np.minimum(begins + chunk, rows)], axis=1)
        return bounds, tf.TensorSpec([2], tf.int64)  # type: ignore[return-value]
    texts = list(checks.sequence("items", items, "strings, or a number of rows"))
    is_right = 0 < len(texts) <= _MOST_ITEMS and all(isinstance(text, str) for text in texts)
    if not is_right:
        raise checks.refuse(
            "items", items, "a non-empty list or tuple of strings, or a number of rows"
        )
    return texts, tf.TensorSpec([], tf.string)


def _ranks_by_rows(strategy: DistributedStrategy) -> Iterator[tuple[int, int]]:
    """For each rank its place among those with other rows, and its number."""
    mesh = strategy.mesh
    for group in mesh.groups(*mesh.row_axes):
        yield from enumerate(group)
