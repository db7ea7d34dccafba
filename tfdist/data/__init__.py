"""How batches are divided among ranks, and where a training stands in its data."""
