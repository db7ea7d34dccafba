"""Errors between workers and parameter servers."""

from __future__ import annotations

from tfdist.utils.errors import TfdistError


class ParameterServerError(TfdistError, RuntimeError):
    """A parameter server, or the worker that all others wait for, does not respond."""
