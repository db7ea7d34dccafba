"""Compiles the parts of a step that XLA can compile."""
