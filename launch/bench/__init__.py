"""`tfdist-bench`: benchmarks of this machine, its links, and the scaling of a training."""
