"""Initializers of slices of arrays."""

from __future__ import annotations

from typing import Any

from tfdist.sharding.parts import NestedSlice, Slice, deep_copy


class SlicedInitializer:
    """The initializer of a slice of an array.

    Args:
        whole: The array's; one that has a method `read_slice(part, dtype)` makes no more than that.
        part: The slice.
    """

    def __init__(self, whole: Any, part: Slice | NestedSlice):
        self.whole = whole
        self._part = part

    def __call__(self, shape, dtype=None):
        """The slice; `shape` is its shape."""
        read = getattr(self.whole, "read_slice", None)
        if read is not None:
            return read(self._part, dtype)
        return deep_copy(self._part.slice_of(self.whole(self._part.shape, dtype=dtype)))
