"""A GPT-2 of KerasHub with adapters, as tfdist and as plain KerasHub have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from .jax_models import Clock
from .serving import LEAD, FitTraining, Settings, Steps, Training, global_batch

#: Those of Keras' AdamW, which PyTorch's is given too.
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.004


def make_task(sizes: Mapping[str, int]) -> keras.Model:
    """The model with its head, without adapters, not compiled."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=sizes["vocabulary"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        hidden_dim=sizes["width"],
        intermediate_dim=4 * sizes["width"],
        dropout=0.0,
        max_sequence_length=sizes["positions"],
    )
    return keras_hub.models.GPT2CausalLM(backbone, compile=False)


def compile_task(task: keras.Model, loss: keras.losses.Loss, **options) -> None:
    """Compiles for training, without metrics, and for greedy generation if the model can generate."""
    if isinstance(task, keras_hub.models.CausalLM):
        options["sampler"] = "greedy"
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    task.compile(optimizer, loss, weighted_metrics=None, **options)


def training_of(
    task: keras.Model,
    settings: Settings,
    shape_of: Callable[[keras.Variable], tuple[int, ...]],
    conversations: tuple[Any, int] | None = None,
) -> Training:
    """What a job measures of a compiled task: steps of training, or calls of `generate`.

    Args:
        task: The task.
        settings: Of this rank.
        shape_of: The shape that a variable has over all ranks.
        conversations: An endless data set of conversations, and its number of batches; None for equal rows.
    """
    adapters = {id(v) for v in task.weights if v.name.startswith("lora_")}
    base = sum(math.prod(shape_of(v)) for v in task.weights if id(v) not in adapters)
    trained = sum(math.prod(shape_of(v)) for v in task.trainable_weights)
    if settings.options["measure"] == "generate":
        return Generation(task, settings.sizes, base, trained)
    clock = Clock if keras.backend.backend() == "jax" else _clock
    if conversations is not None:
        data, batches = conversations
        return FitTraining(task, data, clock, base, trained, batches)
    tokens, labels = global_batch(settings)
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    return FitTraining(task, data, clock, base, trained)


class Generation:
    """A model of which each step writes some tokens after a prompt, the likeliest each time.

    Args:
        task: The compiled task.
        sizes: Of the model, the prompt and what is written.
        parameters: How many the model has without adapters.
        trained: How many are trained.
    """

    def __init__(self, task, sizes: Mapping[str, int], parameters: int, trained: int):
        self.parameters, self.trained = parameters, trained
        self._task = task
        length = sizes["prompt"] + sizes["written"]
        random = np.random.default_rng(0)
        tokens = random.integers(0, sizes["vocabulary"], (sizes["batch"], length), "int32")
        mask = np.broadcast_to(np.arange(length) < sizes["prompt"], tokens.shape).astype("int32")
        self._prompt = {"token_ids": tokens * mask, "padding_mask": mask}

    def block(self, steps: int) -> Steps:
        """Writes so many times."""
        block = Steps()
        for _ in range(LEAD - 1):
            block.begin()  # A call is as good as the next: none is left out.
        for _ in range(steps):
            block.begin()
            self._task.generate(dict(self._prompt), stop_token_ids=None)
        block.begin()
        return block


def _clock(note: Callable[[], None]) -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: note())
