"""Checks of arguments, errors, quantities and lazy imports. No TensorFlow."""
