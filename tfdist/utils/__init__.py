"""Checks of arguments, errors and quantities, without TensorFlow."""
