"""The path of a gradient from the tape to the optimizer: weighed, reduced, clipped."""
