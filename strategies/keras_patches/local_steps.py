"""Ranks that step apart: which parameters Keras sees where nothing trains.

Under an optimizer of `tfdist.addons.slow_links.local_sgd` each rank trains parameters of its own. What is evaluated,
predicted with, saved and shown to callbacks at the end of an epoch is the model that ranks have
agreed on last: the same on all of them, and what a checkpoint holds.
"""

from __future__ import annotations

import contextlib

import keras

from tfdist.step.local_steps import local_optimizer


def global_parameters(model) -> contextlib.AbstractContextManager:
    """Inside, a model has the parameters that ranks have agreed on last, where it trains apart."""
    local = local_optimizer(model) if isinstance(model, keras.Model) else None
    return contextlib.nullcontext() if local is None else local.global_parameters()
