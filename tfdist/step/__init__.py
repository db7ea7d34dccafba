"""What is under way: the strategy, the replica and the Keras step, and the hooks of a `fit`."""
