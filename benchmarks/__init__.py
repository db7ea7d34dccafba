"""Benchmarks: what the README reports, measured."""
