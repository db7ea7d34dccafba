"""Keras 3 on JAX: on one device, or over devices or processes by keras.distribution."""

from __future__ import annotations

import itertools
import os
import re

import keras

from .jax_models import Clock, count, make_model
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds the model, and this process's part of the distribution."""
    if settings.ranks == 1:
        # Before XLA makes its pool, which may be larger.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    else:
        keras.distribution.initialize()
    keras.utils.set_random_seed(0)
    kind = settings.options.get("distribution")
    if kind is not None:
        devices = keras.distribution.list_devices()
        if len(devices) != 2:
            raise RuntimeError(f"The comparison requires two devices. Received: {devices}.")
        keras.distribution.set_distribution(_DISTRIBUTIONS[kind](devices))
    model = make_model(settings)
    if kind == "model":
        _check_layouts(model)
    rows = own_rows(settings)
    return FitTraining(model, (rows for _ in itertools.count()), Clock, count(model))


def _data_parallel(devices: list[str]) -> keras.distribution.Distribution:
    # Each process brings its own rows, so that nothing has to be split.
    return keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)


def _model_parallel(devices: list[str]) -> keras.distribution.Distribution:
    """The layouts of Megatron-LM: columns, then rows, and the vocabulary."""
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    for path, layout in _LAYOUTS.items():
        layouts[f".*/{path}"] = layout  # Keras compares with the whole path.
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
    )


def _check_layouts(model: keras.Model) -> None:
    """Refuses a model of which a layout splits nothing: Keras would hold it whole and say nothing."""
    paths = {
        variable.path
        for variable in model.trainable_variables
        if any(axis is not None for axis in variable.value.sharding.spec)
    }
    for path in _LAYOUTS:
        if not any(re.fullmatch(f".*/{path}", each) for each in paths):
            raise RuntimeError(
                f"The layout of {path!r} does not split anything. The split variables are: {paths}."
            )


#: Of paths, without what comes before.
_LAYOUTS = {
    "embedding/vocabulary": ("model", None),
    "qkv/kernel": (None, None, "model"),
    "qkv/bias": (None, "model"),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "out/kernel": ("model", None),
    "down/kernel": ("model", None),
}

_DISTRIBUTIONS = {"data": _data_parallel, "model": _model_parallel}
