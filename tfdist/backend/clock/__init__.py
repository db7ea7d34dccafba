"""Time stamps in the graph of a step, and the intervals that they enclose."""
