"""Measurements and checks that need a GPU: `python -m benchmarks.gpu --budget=480`."""
