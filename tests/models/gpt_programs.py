"""Training of a small GPT, alike on one process and on any mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib

import keras
import numpy as np
import tensorflow as tf

STEPS, BATCH, TIME = 20, 8, 16


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    evaluation: float
    predictions: np.ndarray
    weights: dict[str, np.ndarray]
    slots: dict[str, np.ndarray]


def text(rows: int, vocabulary: int, seed: int = 0):
    """Sequences with something to learn: each token follows from the one before, mostly."""
    random = np.random.default_rng(seed)
    tokens = np.empty((rows, TIME + 1), "int32")
    tokens[:, 0] = random.integers(0, vocabulary, rows)
    for place in range(TIME):
        noise = random.integers(0, vocabulary, rows)
        follows = (tokens[:, place] * 3 + 1) % vocabulary
        tokens[:, place + 1] = np.where(random.random(rows) < 0.8, follows, noise)
    return tokens[:, :-1], tokens[:, 1:]


def scope(mesh: dict | None):
    """The scope of a strategy over this rank's engine, or none.

    `mesh` may have a zero_stage, and a compression.
    """
    if mesh is None:
        return contextlib.nullcontext()
    from tfdist import Mesh
    from tfdist.testing import strategy

    axes = dict(mesh)
    options = {
        "zero_stage": axes.pop("zero_stage", 0),
        "compression": axes.pop("compression", None),
    }
    return strategy(Mesh(**axes), **options).scope()


def build(vocabulary: int = 61, **options):
    from tfdist import models

    defaults = {"num_layers": 2, "width": 32, "num_heads": 4, "max_length": TIME}
    return models.gpt(vocabulary, **{**defaults, **options})


def make_optimizer(kind: str):
    if kind == "sgd":
        return keras.optimizers.SGD(0.3, momentum=0.9, global_clipnorm=1.0)
    if kind == "clipnorm":
        return keras.optimizers.SGD(0.3, momentum=0.9, clipnorm=0.1)
    return keras.optimizers.AdamW(
        3e-3, weight_decay=0.1, use_ema=True, ema_momentum=0.9, global_clipnorm=0.5
    )


def train(
    mesh: dict | None,
    *,
    optimizer: str = "sgd",
    stock_loss: bool = False,
    vocabulary: int = 61,
    rows: int = STEPS * BATCH,
    seed: int = 3,
    evaluate: bool = True,
    **options,
) -> Outcome:
    """Twenty steps; each is an epoch to Keras, so that the history holds the loss of each."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = text(rows, vocabulary)
    with scope(mesh):
        model = build(vocabulary, **options)
        if stock_loss:
            model.compile(
                make_optimizer(optimizer),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        else:
            model.compile(make_optimizer(optimizer), layers.VocabParallelCrossEntropy(vocabulary))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(data.repeat(), steps_per_epoch=1, epochs=STEPS, verbose=0)
    losses = history.history["loss"]
    if stock_loss:
        losses = losses + history.history["accuracy"]
    evaluation, predictions = [0.0], np.zeros(0)
    if evaluate:
        evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predictions = model.predict(x[: 2 * BATCH], batch_size=BATCH, verbose=0)
    return Outcome(
        losses,
        np.ravel(evaluation)[0],
        predictions,
        whole(model.weights),
        whole(model.optimizer.variables),
    )


def whole(variables) -> dict[str, np.ndarray]:
    from tfdist.sharding import whole_value

    return {f"{i}/{v.name}": whole_value(v).numpy() for i, v in enumerate(variables)}


def bytes_of_rank(mesh: dict | None, **options) -> dict[str, list[int]]:
    """Bytes on this rank, by kind: [parameters, gradients, optimizer state]; and as it should be."""
    from tfdist import layers
    from tfdist.sharding.layout import layout_of

    keras.backend.clear_session()
    x, y = text(BATCH, 61)
    with scope(mesh):
        model = build(61, **options)
        model.compile("adam", layers.VocabParallelCrossEntropy(61))
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    live = [
        sum(v.value.numpy().nbytes for v in model.trainable_variables),
        sum(tf.convert_to_tensor(g).numpy().nbytes for g in gradients if g is not None),
        sum(v.value.numpy().nbytes for v in model.optimizer.variables),
    ]

    def right(variables) -> float:
        total = 0.0
        for variable in variables:
            sharding = layout_of(variable).slice
            shape = variable.shape if sharding is None else sharding.shape
            parts = 1 if sharding is None else sharding.group.size
            total += float(np.prod(shape)) * 4 / parts
        return total

    parameters = right(model.trainable_variables)
    expected = [parameters, parameters, right(model.optimizer.variables)]
    slices = [layout_of(variable).slice for variable in model.trainable_variables]
    split = sum(float(np.prod(each.shape)) * 4 for each in slices if each is not None)
    return {"live": live, "expected": expected, "split": [split]}


def collectives_of_block(mesh: dict, sequence_parallel: bool) -> dict[str, dict[str, int]]:
    """How many collectives of each kind a block takes: forward alone, and with its gradient."""
    from tfdist import Mesh, models
    from tfdist.testing import engine, strategy

    counts = {}
    parallel = strategy(Mesh(**mesh))
    with parallel.scope():
        block = models.TransformerDecoderBlock(
            4, 64, dropout=0.1, sequence_parallel=sequence_parallel
        )
        block.build((2, 8, 32))
    for what in ("forward", "both"):

        @tf.function
        def function(x, what=what):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = block(x, training=True)
            if what == "forward":
                return y
            sources = [x, *(v.value for v in block.trainable_variables)]
            return tape.gradient(y, sources)

        graph = function.get_concrete_function(tf.TensorSpec([2, 8, 32])).graph
        kinds: dict[str, int] = {}
        for operation in graph.get_operations():
            kind = operation.type
            if kind == "TfdistSend":
                # Between two ranks a collective is one message each way, under its name.
                kind = operation.get_attr("tag").decode().partition("/")[0]
            elif not kind.startswith(("Horovod", "Collective")):
                continue
            kinds[kind] = kinds.get(kind, 0) + 1
        counts[what] = kinds
    assert engine(Mesh(**mesh)) is parallel.engine
    return counts


def save(mesh: dict | None, path: str, **options):
    """Trains, saves, and returns predictions, losses of five more steps, and where they led."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = text(STEPS * BATCH, 61)
    with scope(mesh):
        model = build(**options)
        model.compile(make_optimizer("sgd"), layers.VocabParallelCrossEntropy(61))
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    model.save(path)
    return go_on(model, x, y)


def load(mesh: dict | None, path: str):
    """Loads what `save` saved, and goes on in the same way."""
    importlib.import_module("tfdist.layers")  # Keras finds the classes that are registered.
    keras.backend.clear_session()
    x, y = text(STEPS * BATCH, 61)
    with scope(mesh):
        model = keras.saving.load_model(path)
    return go_on(model, x, y)


def go_on(model, x, y):
    predictions = model.predict(x[:BATCH], verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    history = model.fit(data, steps_per_epoch=1, epochs=5, verbose=0)
    return predictions, history.history["loss"], whole(model.weights)
