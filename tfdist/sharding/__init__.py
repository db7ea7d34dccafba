"""What part of a global array a variable is, and all that follows from it."""

from tfdist.sharding.layout import VariableLayout, whole_value
from tfdist.sharding.parts import FlatShard, Slice

__all__ = ["FlatShard", "Slice", "VariableLayout", "whole_value"]
