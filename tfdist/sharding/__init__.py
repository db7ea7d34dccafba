"""`VariableLayout`: the part of a global array that a variable holds."""

from tfdist.sharding.layout import whole_value

__all__ = ["whole_value"]
