"""The version of tfdist, in the one place that both setup.cfg and the package read."""

__version__ = "0.1.0"
