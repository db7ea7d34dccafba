"""What the scripts share: how rows come to `fit`, and what of a run is compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.programs import Result, finish, scope, start

__all__ = [
    "EVEN",
    "ORDERS",
    "UNEVEN",
    "Feed",
    "Result",
    "adam",
    "rng",
    "run",
    "scope",
    "sgd",
    "start",
]

#: Orders of the rows of a batch.
ORDERS = {
    "given": lambda rows: rows,
    "backwards": lambda rows: rows[::-1],
    "rotated": lambda rows: np.roll(rows, len(rows) // 2),
    "even, then odd": lambda rows: np.concatenate([rows[::2], rows[1::2]]),
}


@dataclasses.dataclass(frozen=True)
class Feed:
    """How a script's rows reach the model.

    Attributes:
        kind: "numpy", or "data" for `tf.data`.
        rows: How many rows there are.
        batch: The global batch.
        order: Of the rows within each batch, one of `ORDERS`; another one changes no more than the
            order of the sums.
    """

    kind: str
    rows: int
    batch: int
    order: str = "given"

    def __str__(self) -> str:
        return f"{self.kind}-{self.rows}-by-{self.batch}"

    def arranged(self, arrays):
        """The arrays with their rows in the order of this feed."""
        rows = np.arange(self.rows)
        starts = range(0, self.rows, self.batch)
        rows = np.concatenate([ORDERS[self.order](rows[i : i + self.batch]) for i in starts])
        return tf.nest.map_structure(lambda array: np.asarray(array)[rows], arrays)

    def batches(self, *parts) -> tf.data.Dataset:
        """The parts of a batch, as `fit` takes them from a data set; the last batch may be smaller."""
        parts = self.arranged(parts)
        return tf.data.Dataset.from_tensor_slices(parts).batch(self.batch)

    def fit(self, model, x, y=None, sample_weight=None, *, epochs: int = 2, **options):
        """Trains on these arrays; returns the history."""
        parts = [part for part in (x, y, sample_weight) if part is not None]
        if self.kind == "data":
            return model.fit(self.batches(*parts), epochs=epochs, verbose=0, **options)
        x, y, sample_weight = [*self.arranged(parts), None, None][:3]
        return model.fit(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=self.batch,
            epochs=epochs,
            verbose=0,
            shuffle=False,
            **options,
        )


#: Batches of 6 rows divide by 2 and by 3. Of 5, 5 and 1 rows none divides by 2, and the last leaves
#: all ranks but one without rows.
EVEN, UNEVEN = (12, 6), (11, 5)


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def sgd(**options) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def adam(**options) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3, **options)


def run(
    strategy,
    feed: Feed,
    build,
    compiled,
    x,
    y=None,
    sample_weight=None,
    *,
    epochs: int = 2,
    extra: Any = None,
    **fit,
) -> Result:
    """Builds, compiles, trains, evaluates on odd batches and predicts.

    Args:
        strategy: The strategy, or None for plain Keras.
        feed: How the rows come.
        build: Makes the model.
        compiled: Makes the arguments of `compile`.
        x: Inputs.
        y: Targets.
        sample_weight: Weights of samples.
        epochs: How many.
        extra: A function of the model, whose value joins the result.
        **fit: More for `fit`.
    """
    start()
    with scope(strategy):
        model = build()
        model.compile(**compiled())
    history = feed.fit(model, x, y, sample_weight, epochs=epochs, **fit)
    result = finish(model, history, x, y, batch_size=4)
    result.extra = None if extra is None else extra(model)
    return result
