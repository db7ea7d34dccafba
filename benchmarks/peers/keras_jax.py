"""Keras 3 on JAX: in one process on one device, or over devices or processes by keras.distribution."""

from __future__ import annotations

import itertools

import keras

from .jax_models import Clock, count, make_model
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds the model."""
    keras.utils.set_random_seed(0)
    model = make_model(settings)
    rows = own_rows(settings)
    return FitTraining(model, (rows for _ in itertools.count()), Clock, count(model))
