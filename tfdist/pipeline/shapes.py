"""Shapes of a model's inputs, as a user says them, and of what follows, by the number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.utils import checks

Row = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The shape of a tensor as it follows from the number of rows.

    A position bias has no row for each of the batch, and windows of pictures are many to each row.

    Attributes:
        dtype: The dtype.
        sizes: For each dim how much it grows with each row, and its size for no row; None for a dim
            of unknown size.
    """

    dtype: tf.DType
    sizes: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, two: tf.TensorSpec, three: tf.TensorSpec) -> RowShape:
        """From the shapes for two and for three rows."""
        sizes = [
            None if low is None or high is None else (high - low, 3 * low - 2 * high)
            for low, high in zip(two.shape, three.shape, strict=True)
        ]
        return cls(two.dtype, tuple(sizes))

    @property
    def is_known(self) -> bool:
        """Whether the number of rows says all."""
        return None not in self.sizes

    @property
    def has_rows(self) -> bool:
        """Whether the tensor has one row for each of the batch."""
        return self.sizes[:1] == ((1, 0),)

    def at(self, rows: int | tf.Tensor) -> list:
        """The sizes of its dims for so many rows, which may be an int32 scalar."""
        return [None if size is None else _size(*size, rows) for size in self.sizes]

    def spec(self, rows: int | None) -> tf.TensorSpec:
        """What the tensor is like for so many rows, if they are known."""
        sizes = [
            None if size is None or (size[0] and rows is None) else _size(*size, rows or 0)
            for size in self.sizes
        ]
        return tf.TensorSpec(sizes, self.dtype)


def _size(grows: int, begin: int, rows):
    return grows * rows + begin if grows else begin


def rows_of_inputs(
    inputs: Sequence[keras.KerasTensor], given: Sequence | Mapping | None
) -> list[Row]:
    """The shape of a row of each input, as far as the model or the argument `input_shape` says it.

    Args:
        inputs: The inputs of a model.
        given: The argument: for one input its shape; for several one shape for all those that leave
            sizes open, a dict by the inputs' names, or a list with a shape for each.

    Raises:
        ValueError: It is none of these, or says something else than the model.
    """
    own: list[Row] = [tuple(tensor.shape[1:]) for tensor in inputs]
    if given is None:
        return own
    shapes: list[Row | None]
    names = [tensor.name for tensor in inputs]
    if isinstance(given, Mapping):
        strange = [name for name in given if name not in names]
        if strange or not given:
            raise checks.refuse("input_shape", given, f"a shape for inputs of {names}")
        shapes = [_row(given[name]) if name in given else None for name in names]
    elif len(inputs) > 1 and _is_list_of_shapes(given):
        if len(given) != len(inputs):
            raise checks.refuse("input_shape", given, f"a shape for each of the inputs {names}")
        shapes = [None if row is None else _row(row) for row in given]
    else:
        one = _row(given)
        is_open = [None in row for row in own]
        shapes = [one if here or not any(is_open) else None for here in is_open]
    for shape, row in zip(shapes, own, strict=True):
        if shape is not None and not _fits(shape, row):
            whose = f"{row}" if len(inputs) == 1 else f"{dict(zip(names, own, strict=True))}"
            what = "the shape of a row" if len(inputs) == 1 else "the shapes of rows"
            raise checks.refuse("input_shape", given, f"{what}, {whose}")
    return [row if shape is None else shape for shape, row in zip(shapes, own, strict=True)]


def _row(shape) -> Row:
    return checks.integers("input_shape", shape, minimum=1, none=True, empty=True)


def _is_list_of_shapes(given) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return is_list and any(hasattr(entry, "__len__") for entry in given)


def _fits(shape: Row, row: Row) -> bool:
    """Whether a shape says nothing else than another does, in which dims may be open."""
    return len(shape) == len(row) and all(
        size == known or known is None for size, known in zip(shape, row, strict=True)
    )
