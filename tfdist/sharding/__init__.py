"""`VariableLayout`: what part of a global array a variable is, and all that follows from it."""

from tfdist.sharding.layout import whole_value

__all__ = ["whole_value"]
