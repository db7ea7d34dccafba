"""Keras 3 on JAX: on one device, or over devices or processes by keras.distribution."""

from __future__ import annotations

import itertools

import keras

from .jax_models import Clock, count, make_model
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds the model, and this process's part of the distribution."""
    if settings.ranks > 1:
        keras.distribution.initialize()
    keras.utils.set_random_seed(0)
    kind = settings.options.get("distribution")
    if kind is not None:
        devices = keras.distribution.list_devices()
        if len(devices) != 2:
            raise RuntimeError(f"Two devices are compared with two ranks. Received: {devices}.")
        keras.distribution.set_distribution(_DISTRIBUTIONS[kind](devices))
    model = make_model(settings)
    rows = own_rows(settings)
    return FitTraining(model, (rows for _ in itertools.count()), Clock, count(model))


def _data_parallel(devices: list[str]) -> keras.distribution.Distribution:
    # Each process brings its own rows, so that nothing has to be split.
    return keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)


def _model_parallel(devices: list[str]) -> keras.distribution.Distribution:
    """The layouts of Megatron-LM: columns, then rows, and the vocabulary."""
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["embedding/vocabulary"] = ("model", None)
    layouts["qkv/kernel"] = (None, None, "model")
    layouts["qkv/bias"] = (None, "model")
    layouts["up/kernel"] = (None, "model")
    layouts["up/bias"] = ("model",)
    layouts["(out|down)/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
    )


_DISTRIBUTIONS = {"data": _data_parallel, "model": _model_parallel}
