"""Shapes of a model's inputs as given by a user, and of other tensors by the number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.utils import checks

Row = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The shape of a tensor as a function of the number of rows of the batch.

    A position bias has no row for each of the batch, and windows of images are several for each row.

    Attributes:
        dtype: The dtype.
        sizes: For each dim the increase of its size with each row, and its size for no row; None for a
            dim of unknown size.
    """

    dtype: tf.DType
    sizes: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, two: tf.TensorSpec, three: tf.TensorSpec) -> RowShape:
        """The function from the shapes for two and for three rows."""
        sizes = [
            None if low is None or high is None else (high - low, 3 * low - 2 * high)
            for low, high in zip(two.shape, three.shape, strict=True)
        ]
        return cls(two.dtype, tuple(sizes))

    @property
    def is_known(self) -> bool:
        """Whether the shape depends on the number of rows alone."""
        return None not in self.sizes

    @property
    def has_rows(self) -> bool:
        """Whether the tensor has one row for each of the batch."""
        return self.sizes[:1] == ((1, 0),)

    def at(self, rows: int | tf.Tensor | None) -> list:
        """The sizes of its dims; those that are unknown are None.

        Args:
            rows: The number of rows: an int, an int32 scalar, or None if it is unknown.
        """
        return [_size(size, rows) for size in self.sizes]

    def spec(self, rows: int | None) -> tf.TensorSpec:
        """The specification of the tensor for a number of rows; None if it is unknown."""
        return tf.TensorSpec(self.at(rows), self.dtype)


def _size(size: tuple[int, int] | None, rows) -> Any:
    if size is None or (size[0] and rows is None):
        return None
    return size[0] * rows + size[1] if size[0] else size[1]


def rows_of_inputs(
    inputs: Sequence[keras.KerasTensor], given: Sequence | Mapping | None
) -> list[Row]:
    """The shape of a row of each input, as far as the model or the argument `input_shape` defines it.

    Args:
        inputs: The inputs of a model.
        given: The argument: for one input its shape; for several inputs one shape for all inputs with
            undefined sizes, a dict by the inputs' names, or a list with a shape for each.

    Raises:
        ValueError: It is none of these, or contradicts the model.
    """
    own: list[Row] = [tuple(tensor.shape[1:]) for tensor in inputs]
    if given is None:
        return own
    names = [tensor.name for tensor in inputs]
    each: Sequence
    if isinstance(given, Mapping):
        if not given or any(name not in names for name in given):
            raise checks.refuse("input_shape", given, f"a shape for inputs of {names}")
        each = [given.get(name) for name in names]
    elif len(inputs) > 1 and _is_list_of_shapes(given):
        if len(given) != len(inputs):
            raise checks.refuse("input_shape", given, f"a shape for each of the inputs {names}")
        each = given
    else:
        is_open = [None in row for row in own]
        each = [given if here or not any(is_open) else None for here in is_open]
    found = [row if shape is None else _row(shape) for shape, row in zip(each, own, strict=True)]
    if not all(map(_fits, found, own)):
        meaning = f"the shapes of rows, {dict(zip(names, own, strict=True))}"
        if len(inputs) == 1:
            meaning = f"the shape of a row, {own[0]}"
        raise checks.refuse("input_shape", given, meaning)
    return found


def _row(shape) -> Row:
    return checks.integers("input_shape", shape, minimum=1, none=True, empty=True)


def _is_list_of_shapes(given) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return is_list and any(hasattr(entry, "__len__") for entry in given)


def _fits(shape: Row, row: Row) -> bool:
    """Whether a shape is compatible with another, in which dims may be undefined."""
    return len(shape) == len(row) and all(
        size == known or known is None for size, known in zip(shape, row, strict=True)
    )
