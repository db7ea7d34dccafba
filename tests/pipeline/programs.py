"""Training of chains, alike on one process as a plain model and on any mesh as a pipeline."""

from __future__ import annotations

import dataclasses
import importlib
import time

import keras
import numpy as np
import tensorflow as tf

from tests.models.gpt_programs import BATCH, STEPS, make_optimizer, scope, text, whole


@dataclasses.dataclass
class Outcome:
    history: dict[str, list[float]]
    evaluation: list[float]
    predictions: np.ndarray
    weights: list[np.ndarray]
    own_variables: int


def gpt(vocabulary: int = 61, **options):
    from tfdist import models

    defaults = {"num_layers": 4, "width": 32, "num_heads": 4, "max_length": 16}
    return models.gpt(vocabulary, **{**defaults, **options})


def convnet():
    """Shortcuts, a normalization, a regularizer, an activity regularizer and frozen weights."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(6, 3, padding="same", name="in")(inputs)
    for number in range(2):
        y = keras.layers.LayerNormalization(name=f"norm{number}")(x)
        y = keras.layers.Conv2D(
            6, 3, padding="same", activation="relu", kernel_regularizer="l2", name=f"conv{number}"
        )(y)
        x = keras.layers.Add(name=f"add{number}")([x, y])
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(12, activity_regularizer="l2", name="hidden")(x)
    frozen = keras.layers.Dense(12, activation="tanh", name="frozen")
    frozen.trainable = False
    return keras.Model(inputs, keras.layers.Dense(5, name="out")(frozen(x)))


def data_of(kind: str, rows: int):
    if kind.startswith("gpt"):
        return text(rows, 61)
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 8, 8, 1)).astype("float32")
    return x, random.integers(0, 5, rows)


def train(
    mesh: dict | None,
    kind: str = "gpt",
    *,
    pipeline: dict | None = None,
    optimizer: str = "sgd",
    split_loss: bool = False,
    weighted: bool = False,
    policy: str | None = None,
    rows: int = STEPS * BATCH,
    batch: int = BATCH,
    per_execution: int = 1,
    **options,
) -> Outcome:
    """Twenty steps, each execution an epoch; `pipeline` are the arguments of a PipelineModel."""
    from tfdist import layers
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    before = keras.config.dtype_policy()
    if policy:
        keras.config.set_dtype_policy(policy)
    try:
        with scope(mesh):
            build = {"gpt": gpt, "convnet": convnet}[kind]
            if pipeline is None:
                model = build(**options)
            else:
                with deferred_weights():
                    model = build(**options)
                model = PipelineModel(model, **{"num_microbatches": 4, **pipeline})
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            if split_loss:
                model.compile(make_optimizer(optimizer), layers.VocabParallelCrossEntropy(61))
            else:
                model.compile(
                    make_optimizer(optimizer),
                    loss,
                    metrics=["accuracy"],
                    steps_per_execution=per_execution,
                )
    finally:
        keras.config.set_dtype_policy(before)
    x, y = data_of(kind, rows)
    arrays = [x, y]
    if weighted:
        arrays.append(np.random.default_rng(1).uniform(0.5, 2, rows).astype("float32"))
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(batch)
    epochs = STEPS // per_execution
    history = model.fit(data.repeat(), steps_per_epoch=per_execution, epochs=epochs, verbose=0)
    # Rows that divide by nothing: what is not trained need not.
    evaluation = model.evaluate(x[:21], y[:21], batch_size=batch, verbose=0)
    predictions = model.predict(x[:13], batch_size=batch, verbose=0)
    own = len(model.variables)
    weights = whole((model if pipeline is None else model.chain_model).weights)
    return Outcome(
        history.history,
        list(np.ravel(evaluation)),
        predictions,
        list(weights.values()),
        own,
    )


def save(mesh: dict, folder: str) -> list[np.ndarray]:
    """Trains an epoch with checkpoints of a pipeline; returns the weights of the whole chain."""
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        with deferred_weights():
            model = gpt()
        model = PipelineModel(model, num_microbatches=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_optimizer("sgd"), loss)
    x, y = data_of("gpt", 4 * BATCH)
    checkpoints = [
        keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
        keras.callbacks.ModelCheckpoint(f"{folder}/w.weights.h5", save_weights_only=True),
    ]
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=checkpoints)
    return list(whole(model.chain_model.weights).values())


def load(mesh: dict | None, folder: str) -> list[np.ndarray]:
    """The weights of the whole chain, of the files that `save` has written."""
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    if mesh is None:
        importlib.import_module("tfdist.layers")  # Keras finds the classes that are registered.
        return list(whole(keras.saving.load_model(f"{folder}/model.keras").weights).values())
    with scope(mesh):
        model = PipelineModel(gpt(), num_microbatches=2)
        model.load_weights(f"{folder}/w.weights.h5")
    return list(whole(model.chain_model.weights).values())


def cut_by_time(mesh: dict):
    """The ends of the stages of a chain that was measured, and what its links cost."""
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    with scope(mesh), deferred_weights():
        model = gpt()
    with scope(mesh):
        partition = PipelineModel(
            model, num_microbatches=2, cost="seconds", input_shape=(16,)
        ).partition
    return partition.ends, partition.costs


def graph_sizes(mesh: dict, counts) -> tuple[list[int], float, float]:
    """Operations of a training step by number of micro-batches, and of the last more.

    That is for how many others an operation waits beside those it computes with, and how many
    seconds tracing took.
    """
    from tfdist.pipeline import PipelineModel

    sizes = []
    for count in counts:
        keras.backend.clear_session()
        with scope(mesh) as strategy:
            model = PipelineModel(gpt(num_layers=8), num_microbatches=count)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data = text(count, 61)
        begin = time.perf_counter()
        step = tf.function(lambda batch, run=strategy.run, m=model: run(m.train_step, (batch,)))
        traced = step.get_concrete_function(tuple(tf.constant(part) for part in data))
        seconds = time.perf_counter() - begin
        operations = traced.graph.get_operations()
        sizes.append(len(operations))
    waits = sum(len(operation.control_inputs) for operation in operations) / sizes[-1]
    return sizes, waits, seconds


def refusal(mesh: dict, what: str) -> str:
    """What is said where a pipeline cannot be."""
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    with scope(mesh):
        try:
            if what == "stages":
                PipelineModel([keras.Input((4,)), keras.layers.Dense(2)], num_microbatches=2)
            layers = [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)]
            if what == "untrained":
                layers.insert(1, keras.layers.Rescaling(2.0))
                model = PipelineModel(layers, num_microbatches=2, cut=[1, 2])
            elif what == "shape":
                layers = [
                    keras.Input((None, 4), name="features"),
                    keras.layers.Dense(4),
                    keras.layers.Dense(2),
                ]
                model = PipelineModel(layers, num_microbatches=2)
            else:
                model = PipelineModel(layers, num_microbatches=2)
            model.compile("sgd", "mse")
            if what == "call":
                model(np.zeros((2, 4), "float32"))
            rows = 7 if what == "rows" else 8
            shape = (rows, 4)
            data = tf.data.Dataset.from_tensors((np.zeros(shape, "float32"), np.zeros((rows, 2))))
            if what == "unknown-rows":
                data = data.unbatch().batch(3)
            if what == "shape":
                spec = (tf.TensorSpec((8, None, 4)), tf.TensorSpec((8, None, 2)))
                data = tf.data.Dataset.from_generator(
                    lambda: iter([(np.zeros((8, 3, 4)), np.zeros((8, 3, 2)))]),
                    output_signature=spec,
                )
            model.fit(data, verbose=0)
        except (ValueError, RuntimeError, tf.errors.InvalidArgumentError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was refused"
