"""The rows and tokens of a batch for each rank, and the position in the training data."""
