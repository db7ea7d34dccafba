"""The path of a gradient from the tape to the optimizer: weighting, stages, reduction, clipping."""
