"""Training that is interrupted, and goes on from its last checkpoint."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.models.gpt_programs import build, scope, text

EPOCHS, BATCHES, BATCH = 3, 10, 12


class Interruption(Exception):
    """What ends a training in the middle."""


class Interrupt(keras.callbacks.Callback):
    """Ends the training before a step of it."""

    def __init__(self, step: int):
        super().__init__()
        self._left = step

    def on_train_batch_begin(self, batch, logs=None):
        if self._left == 0:
            raise Interruption
        self._left -= 1


def perceptron(mesh: dict | None):
    with scope(mesh):
        return build_perceptron()


def averaged(mesh: dict | None):
    """With moving averages of the weights, which `SwapEMAWeights` puts into the model."""
    with scope(mesh):
        model, data = build_perceptron()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.8)
        model.compile(optimizer, model.loss, metrics=["accuracy"])
        return model, data


def gpt(mesh: dict | None):
    with scope(mesh):
        return build_gpt()


def experts(mesh: dict | None):
    with scope(mesh):
        return build_experts()


def build_experts(rows: int = BATCHES * BATCH):
    return build_gpt(rows, num_experts=4, experts={"bias_rate": 0.01})


def build_perceptron(rows: int = BATCHES * BATCH):
    """Has all that one step leaves to the next: random masks, moving averages, moments, a scale."""
    model = keras.Sequential(
        [
            keras.Input((9,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(5),
        ]
    )
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    model.compile(
        keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    random = np.random.default_rng(1)
    rows -= 5  # The last batch is smaller.
    return model, (random.normal(size=(rows, 9)).astype("float32"), random.integers(0, 5, rows))


def build_gpt(rows: int = BATCHES * BATCH, **sizes):
    from tfdist import layers
    from tfdist.pipeline import PipelineModel, deferred_weights

    mesh = getattr(tf.distribute.get_strategy(), "mesh", None)
    pipeline = mesh is not None and mesh.shape["pipeline"] > 1
    with deferred_weights() if pipeline else contextlib.nullcontext():
        # No rank of a context axis could drop attention weights.
        options = {"dropout": 0.1, "attention_dropout": 0.0, **sizes}
        model = build(num_layers=4 if pipeline else 1, **options)
    if pipeline:
        model = PipelineModel(model, num_microbatches=2)
    optimizer = keras.optimizers.AdamW(3e-3, weight_decay=0.1, global_clipnorm=1.0)
    model.compile(optimizer, layers.VocabParallelCrossEntropy(61))
    return model, text(rows, 61)


def build_recommender(rows: int = BATCHES * BATCH):
    """Tables that lie in parts on the ranks, by rows, by columns and whole."""
    from tests.addons.recommenders import embedding_programs

    model = embedding_programs.build("rows columns table")
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, embedding_programs.data(rows - 5)


def fed(kind: str, data) -> dict:
    """The data as `fit` is given them."""
    if kind == "arrays":
        return {"x": data[0], "y": data[1], "batch_size": BATCH, "shuffle": True}
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(50)
    if kind == "repeated":
        return {"x": dataset.repeat().batch(BATCH), "steps_per_epoch": BATCHES}
    if kind == "unknown":
        dataset = dataset.filter(lambda x, y: True)
    return {"x": dataset.batch(BATCH)}


def trained(
    mesh: dict | None,
    folder: str,
    build_model=perceptron,
    interrupt: int | None = None,
    feed: str = "arrays",
    saver_last: bool = False,
    swap_on_epoch: bool | None = None,
    steps_per_execution: int = 1,
    **options,
):
    """The history and the weights at the end; None where the training is interrupted.

    Args:
        mesh: The mesh; None for a model without a strategy.
        folder: That of the checkpoints.
        build_model: Builds the model and its data.
        interrupt: The number of steps after which the training is interrupted.
        feed: As for `fed`.
        saver_last: Whether the Checkpointer is the last of the callbacks rather than the first.
        swap_on_epoch: The argument of a SwapEMAWeights; None for none.
        steps_per_execution: As for `compile`.
        **options: Of the Checkpointer.
    """

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model, data = build_model(mesh)
    model.steps_per_execution = steps_per_execution
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=EPOCHS)
    callbacks = [
        stopping,
        # Relative, as in Keras' documentation: once in each epoch, also in one that is resumed.
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]
    if swap_on_epoch is not None:
        callbacks.append(keras.callbacks.SwapEMAWeights(swap_on_epoch))
    saver = tfdist.callbacks.Checkpointer(folder, **{"every_steps": 4, **options})
    callbacks.insert(len(callbacks) if saver_last else 0, saver)
    if interrupt is not None:
        callbacks.append(Interrupt(interrupt))
    first = tuple(part[: 2 * BATCH] for part in data)
    try:
        history = model.fit(
            **fed(feed, data),
            epochs=EPOCHS,
            validation_data=first,
            validation_batch_size=BATCH,
            callbacks=callbacks,
            verbose=0,
        )
    except Interruption:
        return None
    found = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return history.history, history.epoch, stopping.wait, found
