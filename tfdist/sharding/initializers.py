"""An initializer for a slice of an array."""

from __future__ import annotations

from typing import Any

from tfdist.sharding.parts import NestedSlice, Slice, deep_copy


class SlicedInitializer:
    """The initializer of a slice of an array.

    Args:
        whole: The initializer of the array. If it has a method `read_slice(part, dtype)`, only the slice is
            read.
        part: The slice.
    """

    def __init__(self, whole: Any, part: Slice | NestedSlice):
        self.whole = whole
        self._part = part

    def __call__(self, shape, dtype=None):
        """Returns the slice; `shape` is its shape."""
        read = getattr(self.whole, "read_slice", None)
        if read is not None:
            return read(self._part, dtype)
        return deep_copy(self._part.slice_of(self.whole(self._part.shape, dtype=dtype)))
