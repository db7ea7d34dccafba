"""Embeddings whose ids repeat: the update is that of one process of plain Keras, for each optimizer."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.layers import VocabParallelEmbedding
from tfdist.mesh import Mesh
from tfdist.pipeline import PipelineModel
from tfdist.recompute import recompute
from tfdist.sharding.updates import needs_rows
from tfdist.testing import strategy

#: More ids in a batch than the table has rows, and a table that two ranks do not share evenly.
VOCABULARY, WIDTH, TIME, ROWS = 7, 5, 6, 11

OPTIMIZERS = {
    "sgd": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.01, **o),
    "amsgrad": lambda **o: keras.optimizers.Adam(0.01, amsgrad=True, **o),
    "adamw": lambda **o: keras.optimizers.AdamW(0.01, weight_decay=0.1, **o),
    "adamax": lambda **o: keras.optimizers.Adamax(0.01, **o),
    "adadelta": lambda **o: keras.optimizers.Adadelta(1.0, **o),
    "adagrad": lambda **o: keras.optimizers.Adagrad(0.1, **o),
    "ftrl": lambda **o: keras.optimizers.Ftrl(0.1, **o),
    "lion": lambda **o: keras.optimizers.Lion(0.01, **o),
    "nadam": lambda **o: keras.optimizers.Nadam(0.01, **o),
    "schedule_free": lambda **o: keras.optimizers.ScheduleFreeAdamW(0.01, **o),
    "rmsprop": lambda **o: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, **o),
    "adafactor": lambda **o: keras.optimizers.Adafactor(0.01, **o),
    "lamb": lambda **o: keras.optimizers.Lamb(0.01, **o),
}
#: Hands each parameter to another optimizer.
SEVERAL = {
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            OPTIMIZERS["sgd"](),
            {".*embeddings": OPTIMIZERS["adam"](), ".*bias": OPTIMIZERS["lamb"]()},
        )
    )
}
WAYS: dict[str, dict] = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.03},
    "clipvalue": {"clipvalue": 0.001},
    "accumulation": {"gradient_accumulation_steps": 2},
    "average": {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3},
}
MESHES = {
    "data": (Mesh(), {}),
    "zero-1": (Mesh(), {"zero_stage": 1}),
    "zero-2": (Mesh(), {"zero_stage": 2}),
    "zero-3": (Mesh(), {"zero_stage": 3}),
    "eager": (Mesh(), {}),
    "recompute": (Mesh(), {}),
    "pipeline": (Mesh(pipeline=2), {}),
    "pipeline-zero-3": (Mesh(pipeline=2), {"zero_stage": 3}),
    "tensor": (Mesh(tensor=2), {}),
    "tensor-zero-1": (Mesh(tensor=2), {"zero_stage": 1}),
}


class Positions(keras.layers.Layer):
    """Adds what it looks up for each position, as examples of transformers do; for two of them twice."""

    def __init__(self, length: int, again: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(length, WIDTH)
        self.again = again

    def build(self, input_shape):
        self.table.build()
        self.built = True

    def call(self, x):
        length = keras.ops.shape(x)[1]
        found = self.table(keras.ops.arange(length))
        # As in relative positions: ids that come more than once, whatever the batch.
        distances = keras.ops.abs(keras.ops.arange(length)[:, None] - keras.ops.arange(length))
        found += keras.ops.mean(self.table(distances), axis=1)
        if self.again:  # In the same table ids that come from the batch.
            some = keras.ops.cast(keras.ops.argmax(x, axis=-1), "int32")
            found += 0.1 * self.table(some)
        return x + found


def tokens(rows: int = ROWS):
    random = np.random.default_rng(1)
    x = random.integers(0, VOCABULARY - 1, (rows, TIME))  # One row of the table is never looked up.
    x[:, 0] = 3  # One id is there in every row.
    return x, random.integers(0, 4, rows)


def train(strategy, optimizer: str, way: str = "plain", where: str = "data", batch: int = 5):
    programs.start()
    x, y = tokens(8 if "pipeline" in where else ROWS)
    embedding = VocabParallelEmbedding if "tensor" in where else keras.layers.Embedding
    with programs.scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((TIME,), dtype="int32"),
                embedding(VOCABULARY, WIDTH),
                Positions(TIME),
                Positions(TIME, again=not ("pipeline" in where or where == "eager")),
                keras.layers.Dense(3, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )
        if where == "recompute":
            model = recompute(model, "every_layer")
        if "pipeline" in where:
            model = PipelineModel(model, num_microbatches=2)
        model.compile(
            {**OPTIMIZERS, **SEVERAL}[optimizer](**WAYS[way]),
            programs.cross_entropy(),
            run_eagerly=where == "eager",
        )
        if optimizer == "schedule_free":
            # In one process Keras would build it while it traces, and begin anew in each step.
            model.optimizer.build(model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    history = model.fit(data, epochs=3, verbose=0)
    predictions = model.predict(x, batch_size=batch, verbose=0)
    weights = {}
    if where not in ("pipeline", "pipeline-zero-3", "tensor", "tensor-zero-1"):
        weights = {f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.weights)}
    return programs.Result(weights, history.history, {}, [predictions])


def single_lookups(optimizer: str, way: str):
    return train(None, optimizer, way, "eager")


def on_rank(where: str, optimizer: str, way: str = "plain", **options):
    mesh, strategy_options = MESHES[where]
    return train(strategy(mesh, **strategy_options), optimizer, way, where, **options)


@functools.cache
def reference(one_process, optimizer: str, way: str = "plain", pipeline: bool = False):
    options = {"where": "pipeline", "batch": 4} if pipeline else {}
    program = train_whole if pipeline else train
    return one_process.run(program, None, optimizer, way, **options)[0]


def train_whole(strategy, optimizer: str, way: str, where: str, batch: int):
    """The model that a pipeline trains, on its batches, in one piece."""
    before, globals()["PipelineModel"] = PipelineModel, lambda model, **_: model
    try:
        return train(strategy, optimizer, way, where, batch)
    finally:
        globals()["PipelineModel"] = before


#: What three epochs make of float rounding, where an optimizer divides by small numbers.
TOLERANCE = 2e-5


@pytest.mark.slow
@on_ranks(("horovod", 3), ("tensorflow", 2), ("horovod", 2))
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *SEVERAL])
def test_optimizers(pool, one_process, optimizer):
    results = pool.run(on_rank, "data", optimizer)
    programs.assert_same(results, reference(one_process, optimizer), weights=TOLERANCE)


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("way", list(WAYS)[1:])
@pytest.mark.parametrize("where", ["data", "zero-1", "zero-2", "zero-3"])
@pytest.mark.slow
def test_what_optimizers_do_besides(pool, one_process, where, way):
    results = pool.run(on_rank, where, "adam", way)
    programs.assert_same(results, reference(one_process, "adam", way), weights=TOLERANCE)


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize(
    "where", slow_but(["zero-3"], ["zero-1", "zero-2", "zero-3", "recompute", "eager"])
)
@pytest.mark.parametrize(
    "optimizer", slow_but(["adam"], [n for n in OPTIMIZERS if n < "adaf" or n > "adag"])
)
def test_parts(pool, one_process, where, optimizer):
    if optimizer in ("lamb", "schedule_free") and where.startswith("zero"):
        pytest.skip("ZeRO refuses it.")
    results = pool.run(on_rank, where, optimizer)
    expected = reference(one_process, optimizer)
    if where == "eager":  # Without a graph, lookups of both kinds in one table are not told apart.
        (expected,) = one_process.run(single_lookups, optimizer, "plain")
    programs.assert_same(results, expected, weights=TOLERANCE)


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 2))
@pytest.mark.parametrize("where", ["pipeline", "pipeline-zero-3", "tensor", "tensor-zero-1"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adagrad"])
def test_meshes(pool, one_process, where, optimizer):
    is_pipeline = "pipeline" in where
    expected = reference(one_process, optimizer, pipeline=is_pipeline)
    expected = programs.Result({}, expected.history, {}, expected.predictions)
    results = pool.run(on_rank, where, optimizer, batch=4 if is_pipeline else 5)
    programs.assert_same(results, expected, weights=TOLERANCE)


def updated(optimizer: str, sparse: bool) -> np.ndarray:
    """A table after three updates, by rows of which some are of one id, or by their sum."""
    random = np.random.default_rng(0)
    table = keras.Variable(random.normal(size=(VOCABULARY, WIDTH)), dtype="float32")
    each = OPTIMIZERS[optimizer]()
    for _ in range(3):
        rows = tf.IndexedSlices(
            tf.constant(random.normal(size=(5, WIDTH)), tf.float32),
            tf.constant([1, 3, 1, 6, 1]),
            tf.constant([VOCABULARY, WIDTH]),
        )
        each.apply([rows if sparse else tf.convert_to_tensor(rows)], [table])
    return table.numpy()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_which_optimizers_need_rows(optimizer):
    """What Keras' optimizers make of an id that comes twice; fails where Keras changes one."""
    same = np.allclose(updated(optimizer, True), updated(optimizer, False), atol=1e-6)
    assert needs_rows(OPTIMIZERS[optimizer]()) != same


def test_optimizers_are_all_known():
    others = {
        kind
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type)
        and issubclass(kind, keras.optimizers.Optimizer)
        and kind not in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    }
    tried = {type(make()) for make in OPTIMIZERS.values()}
    # The first hands each parameter to another; Muon leaves embeddings to Adam.
    assert {kind.__name__ for kind in others - tried} == {"MultiOptimizer", "Muon"}
