"""Benchmarks: what the README reports, measured. They run from a checkout: `python -m benchmarks.training`."""
