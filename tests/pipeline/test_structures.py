"""Models as others write them: inputs in a dict, outputs in a list, masks, ViT of KerasHub."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.mesh import Mesh
from tfdist.pipeline import PipelineModel
from tfdist.pipeline.chain import Chain
from tfdist.testing import strategy

ROWS, BATCH = 10, 4


def named():
    x = keras.Input((6,), name="features")
    y = keras.layers.Dense(3, name="kind")(keras.layers.Dense(8, activation="tanh")(x))
    return keras.Model({"features": x}, {"kind": y})


def listed():
    x = keras.Input((6,))
    y = keras.layers.Dense(3)(keras.layers.Dense(8, activation="tanh")(x))
    return keras.Model([x], [y])


def of_open_size():
    """How wide the outputs are is known when they are there."""
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    as_it_is = keras.layers.Lambda(lambda x: 1.0 * x, output_shape=(None,))
    return keras.Sequential([*layers, as_it_is])


def masked():
    """The mask of the embedding goes by the LSTM's and the pooling's side."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(5, 4, mask_zero=True),
            keras.layers.LSTM(5, return_sequences=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def vit():
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    return keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=3, preprocessor=None)


def data(kind: str):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, ROWS)
    if kind == "masked":
        x = random.integers(0, 5, (ROWS, 6))
        x[:, 0] = 1
        return x, y
    if kind == "vit":
        return random.normal(size=(ROWS, 16, 16, 3)).astype("float32"), y
    x = random.normal(size=(ROWS, 6)).astype("float32")
    return ({"features": x}, {"kind": y}) if kind == "named" else (x, y)


def train(strategy, kind: str):
    programs.start()
    with programs.scope(strategy):
        model = globals()[kind]()
        if strategy is not None:
            model = PipelineModel(model, num_microbatches=2)
        model.compile(keras.optimizers.SGD(0.1), programs.cross_entropy(), metrics=["accuracy"])
    x, y = data(kind)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(batches, epochs=2, verbose=0)
    result = programs.finish(model, history, x, y, batch_size=BATCH)
    result.weights = {}
    return result, type(model.predict(x, batch_size=BATCH, verbose=0))


def on_rank(kind: str):
    return train(strategy(Mesh(pipeline=2)), kind)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "kind", slow_but(["named"], ["named", "listed", "of_open_size", "masked", "vit"])
)
def test_as_the_whole_model(pool, one_process, kind):
    ((expected, form),) = one_process.run(train, None, kind)
    results = pool.run(on_rank, kind)
    programs.assert_same([result for result, _ in results], expected)
    assert [found for _, found in results] == [form, form]


def test_no_cut_where_a_mask_leads_on():
    segments = Chain(masked()).segments
    assert [[type(layer).__name__ for layer in segment.layers] for segment in segments] == [
        ["Embedding", "LSTM", "GlobalAveragePooling1D"],
        ["Dense"],
        ["Dense"],
    ]


def of_few_rows(strategy, rows: int):
    """Outputs and loss of batches whose static number of rows is less than that of micro-batches."""
    programs.start()
    with programs.scope(strategy):
        model = named()
        if strategy is not None:
            model = PipelineModel(model, num_microbatches=4)
        model.compile(keras.optimizers.SGD(0.1), programs.cross_entropy())
    batches = tf.data.Dataset.from_tensor_slices(data("named")).batch(rows, drop_remainder=True)
    predictions = model.predict(batches.take(2), verbose=0)
    return tf.nest.flatten(predictions)[0], model.evaluate(batches.take(2), verbose=0)


def few_rows_on_rank(rows: int):
    return of_few_rows(strategy(Mesh(pipeline=2)), rows)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_microbatches(pool, one_process, rows):
    ((expected, loss),) = one_process.run(of_few_rows, None, rows)
    for predictions, found in pool.run(few_rows_on_rank, rows, timeout=60):
        np.testing.assert_allclose(predictions, expected, atol=1e-6)
        assert found == pytest.approx(loss, rel=1e-6)
