"""The current strategy, replica and Keras step, and the hooks of a `fit`."""
