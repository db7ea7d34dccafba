"""Benchmarks: what the README reports, measured."""

if __name__ != "tfdist.benchmarks":
    raise ImportError("This package is imported as `tfdist.benchmarks`, not as `benchmarks`.")
