"""Other libraries' names for what tfdist does."""
