"""The strategy, the replica and the Keras step under way, and the hooks of a `fit`."""
