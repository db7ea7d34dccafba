"""Time stamps in the graph of a step, and the intervals between them."""
