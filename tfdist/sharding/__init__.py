"""What part of a global array a variable is, and all that follows from it."""

from tfdist.sharding.layout import VariableLayout, layout_of, whole_value
from tfdist.sharding.parts import FlatShard, Slice

__all__ = ["FlatShard", "Slice", "VariableLayout", "layout_of", "whole_value"]
