"""Log-probabilities of answers by the model as it is now, for comparison during training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.hub.adapters import is_adapter
from tfdist.addons.hub.preferences.losses import LogProbabilityLoss, Recorder
from tfdist.backend.keras.attributes import compile_metrics
from tfdist.collectives.objects import all_gather_object
from tfdist.step.context import strategy_of


def compile_without_metrics(model: keras.Model, **arguments: Any) -> None:
    """Compiles a model. Keras would keep the metrics of an earlier `compile`, which read logits."""
    # The default metric of a task requires whole logits.
    model.compile(weighted_metrics=None, **arguments)
    compile_metrics.set(model, None)


def log_probabilities(
    model: keras.Model,
    data: tf.data.Dataset,
    recorder: Recorder,
    loss: LogProbabilityLoss,
) -> np.ndarray:
    """The log-probability of the answer of each row, or of each token of it; every rank calls this.

    Args:
        model: The model, compiled with the loss, and evaluated with it by this function only.
        data: Global batches of inputs, and labels float32 [rows of the batch, length, 3 or more]: the next token,
            whether it is one of the answer, and last the number of the row.
        recorder: Where the log-probabilities are written; the same one for batches of the same shape.
        loss: The loss.

    Returns:
        float32 of shape [rows], or [rows, length], as the recorder has it.
    """
    strategy: Any = strategy_of(model)
    recorder.reset()
    with loss.recording(recorder):
        model.evaluate(data, verbose=0)
    found, known = recorder.read()
    if strategy is not None and strategy.group().size > 1:
        group = strategy.group()
        for other, is_known in all_gather_object((found, known), group, name="log-probabilities"):
            found, known = np.where(_like(is_known, found), other, found), known | is_known
    if not known.all():
        raise RuntimeError(
            f"Each row must have a log-probability. Received: none for {(~known).sum()} of {len(known)} rows."
        )
    return found


def _like(flags: np.ndarray, values: np.ndarray) -> np.ndarray:
    return flags.reshape(-1, *[1] * (values.ndim - 1))


def check_adapters(backbone: Any) -> None:
    """Checks that the model without its LoRA adapters is the one before they were trained.

    Raises:
        ValueError: Other weights are trained too, or there are no adapters.
    """
    variables = backbone.trainable_variables
    others = [variable for variable in variables if not is_adapter(variable)]
    if others or not variables:
        received = f"`{others[0].path}` is trained" if others else "no adapters"
        raise ValueError(
            "Log-probabilities without adapters require that only adapters are trained. Received: "
            f"{received}. Compute those of the reference model before training."
        )


@contextlib.contextmanager
def without_adapters(backbone: Any) -> Iterator[None]:
    """Inside, the model computes without its LoRA adapters, which `check_adapters` allows."""
    check_adapters(backbone)
    variables = backbone.trainable_variables
    factors = [variable for variable in variables if variable.name.endswith("_b")]
    before = [tf.identity(variable.value) for variable in factors]
    try:
        for variable in factors:
            variable.assign(tf.zeros_like(variable.value))
        yield
    finally:
        for variable, value in zip(factors, before, strict=True):
            variable.assign(value)
