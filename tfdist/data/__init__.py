"""Which rows and tokens of a batch are those of a rank, and the position in the training data."""
