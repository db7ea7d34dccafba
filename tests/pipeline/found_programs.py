"""Models that were made elsewhere, wrapped by `PipelineModel`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist.sharding import whole_value

X = np.random.default_rng(3).normal(size=(33, 6)).astype("float32")


def scope(data: int = 1):
    import tfdist
    from tfdist.testing import strategy

    return strategy(tfdist.Mesh(data=data, pipeline=2)).scope()


def pipeline(model, count: int = 2, *, cut="even", data: int = 1, **options):
    import tfdist

    with scope(data):
        found = tfdist.pipeline.PipelineModel(model, num_microbatches=count, cut=cut)
        found.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return found


def chain(*more) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6) for _ in range(4)]
    return keras.Sequential([keras.Input((6,)), *layers, *more])


def made_outside_of_the_scope(file: str) -> float:
    """The loss of a model whose weights are saved."""
    model = pipeline(chain())
    model.fit(X[:32], X[:32], epochs=2, verbose=0)
    model.save_weights(file)
    return model.evaluate(X, X, verbose=0)


def loaded(file: str) -> float:
    model = chain()
    model.compile("sgd", "mse")
    model.load_weights(file)
    return model.evaluate(X, X, verbose=0)


def saved_again(file: str) -> tuple[bool, float, float]:
    """Whether a model with an optimizer still has one after a pipeline has trained it; and the loss."""
    model = chain()
    model.compile("adam", "mse")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model = pipeline(model, optimizer="adam")
    model.fit(X[:32], X[:32], verbose=0)
    model.save(file)
    found = keras.saving.load_model(file)
    is_compiled = found.compiled
    found.compile("adam", "mse")
    return is_compiled, model.evaluate(X, X, verbose=0), found.evaluate(X, X, verbose=0)


class WithLoss(keras.Model):
    """A model with a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


class Penalty(keras.layers.Layer):
    """Adds a loss that is not defined without rows."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


class Unused(keras.layers.Layer):
    """Has a weight without a gradient."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), name="unused")
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


class Positions(keras.layers.Layer):
    """Ids that do not depend on the batch."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = keras.layers.Embedding(9, 4), keras.layers.Embedding(6, 4)

    def build(self, shape):
        for layer in (self.tokens, self.places):
            layer.build()

    def call(self, ids):
        return self.tokens(ids) + self.places(keras.ops.arange(6))


def with_a_loss_of_its_own() -> str:
    layers = chain()
    return _said(lambda: pipeline(WithLoss(layers.inputs, layers.outputs)))


def frozen_later() -> str:
    layers = chain()
    model = pipeline(layers)
    for layer in layers.layers[:-1]:
        layer.trainable = False
    return _said(lambda: model.compile("sgd", "mse"))


def _said(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def without_a_loss(on_ranks: bool) -> Any:
    """Only the losses of layers; the last batch has a row for eight micro-batches."""
    model = chain(Penalty())
    if on_ranks:
        model = pipeline(model, 8, loss=None)
    else:
        model.compile("sgd")
    history = model.fit(X[:32], batch_size=16, epochs=2, verbose=0, shuffle=False).history
    return history["loss"], model.evaluate(X, batch_size=16, verbose=0)


def with_an_unused_weight() -> float:
    import tfdist

    callbacks = [tfdist.callbacks.TerminateOnNonFinite()]
    model = pipeline(chain(Unused()))
    return model.fit(X[:32], X[:32], verbose=0, callbacks=callbacks).history["loss"][0]


def positions(on_ranks: bool) -> float:
    keras.utils.set_random_seed(1)
    layers = [Positions(), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    if on_ranks:
        model = pipeline(model, run_eagerly=True)
    else:
        model.compile("sgd", "mse")
    ids = np.random.default_rng(1).integers(0, 9, (32, 6))
    history = model.fit(ids, X[:32, :3], batch_size=16, epochs=2, verbose=0, shuffle=False).history
    return history["loss"]


class Added(keras.layers.Layer):
    """Adds a table of positions, whose rows do not depend on the batch."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(5, 6)

    def build(self, shape):
        self.table.build(None)
        self.built = True

    def call(self, x):
        return x + self.table(keras.ops.arange(5))

    def compute_output_shape(self, shape):
        return shape


def shared_positions(on_ranks: bool) -> list:
    """The weights after a table of positions was added in two stages."""
    keras.utils.set_random_seed(1)
    added, inputs = Added(), keras.Input((5, 6))
    x = added(inputs)
    for _ in range(3):
        x = keras.layers.Dense(6, activation="tanh")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(added(x))))
    options = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}
    if on_ranks:
        model = pipeline(model, data=2, **options)
    else:
        model.compile(**options)
    x = np.random.default_rng(1).normal(size=(32, 5, 6))
    model.fit(x, X[:32, :3], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return _weights(model, on_ranks)


def _weights(model, on_ranks: bool) -> list:
    """The weights of the whole model."""
    whole_model = model.chain_model if on_ranks else model
    return [whole_value(weight).numpy() for weight in whole_model.weights]


def shared_table(on_ranks: bool) -> list:
    """The weights after a table was looked up in two stages, for ids of which some are equal."""
    keras.utils.set_random_seed(1)
    table = keras.layers.Embedding(9, 6, name="table")
    first, second = (keras.Input((5,), dtype=dtype) for dtype in ("int32", "int64"))
    x = table(first)
    for _ in range(3):
        x = keras.layers.Dense(6, activation="tanh")(x)
    x = keras.layers.Flatten()(keras.layers.Add()([x, table(second)]))
    model = keras.Model([first, second], keras.layers.Dense(3)(x))
    options = {"optimizer": keras.optimizers.Adam(0.01, clipnorm=0.02), "loss": "mse"}
    if on_ranks:
        model = pipeline(model, **options)
        parts = [model.partition.segments_of_rank(rank) for rank in range(2)]
        if not all(any(table in segment.layers for segment in part) for part in parts):
            raise RuntimeError("The table is in one stage.")
    else:
        model.compile(**options)
    ids = np.random.default_rng(1).integers(0, 9, (2, 32, 5)) // [[[1]], [[2]]]
    model.fit([*ids], X[:32, :3], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return _weights(model, on_ranks)


def stopped(on_ranks: bool) -> list:
    """The weights after a stage has stopped the gradient of a layer of the stage before."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    early = keras.layers.Dense(6, activation="tanh")(inputs)
    x = keras.layers.Dense(6, activation="tanh")(early)
    x = keras.layers.Dense(6)(keras.ops.stop_gradient(x))
    model = keras.Model(inputs, [early, keras.layers.Dense(6)(x)])
    options = {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1), "loss": ["mse", "mse"]}
    if on_ranks:
        model = pipeline(model, cut=[2, 3], **options)
    else:
        model.compile(**options)
    model.fit(X[:32], [X[:32]] * 2, batch_size=16, epochs=2, verbose=0, shuffle=False)
    return _weights(model, on_ranks)


def nothing_learned() -> str:
    """No loss depends on the weights of the first rank."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(6, name="first")(inputs)
    outputs = keras.layers.Dense(6)(keras.ops.stop_gradient(x))
    return _said(lambda: pipeline(keras.Model(inputs, outputs), cut=[1, 2]).fit(X[:32], X[:32]))


def shared_state() -> str:
    """Two stages update moving averages."""
    inputs = x = keras.Input((6,))
    layer = keras.layers.BatchNormalization(name="shared")
    for _ in range(2):
        x = layer(keras.layers.Dense(6)(x))
    return _said(lambda: pipeline(keras.Model(inputs, x)).fit(X[:32], X[:32]))


def in_float8() -> str:
    model = chain()
    model.quantize("float8")
    return _said(lambda: pipeline(model))


def constant_states(on_ranks: bool) -> list:
    """The weights after two stages have used layers whose states stay as they are."""
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((6,))
    fixed = keras.layers.Normalization()
    fixed.adapt(X)
    frozen = keras.layers.BatchNormalization(trainable=False)
    for _ in range(2):
        x = frozen(keras.layers.Dense(6)(fixed(x)))
    model = keras.Model(inputs, x)
    if on_ranks:
        model = pipeline(model, cut=[3, 3])
    else:
        model.compile("sgd", "mse")
    model.fit(X[:32], X[:32], verbose=0, shuffle=False)
    return _weights(model, on_ranks)


def policy_of_the_model() -> str:
    layers = chain()
    model = keras.Model(layers.inputs, layers.outputs)
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    return type(pipeline(model).optimizer).__name__


def masked(recomputed: bool) -> list[float]:
    """The losses of a block that receives its mask with its input."""
    import tfdist

    keras.utils.set_random_seed(1)
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(4))
    embedding = keras.layers.Embedding(9, 5, mask_zero=True)
    model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, lstm])
    model.add(keras.layers.Dense(3))
    if recomputed:
        tfdist.recompute.recompute(lstm)
    model.compile("sgd", "mse")
    ids = np.sort(np.random.default_rng(1).integers(0, 9, (32, 6)))[:, ::-1] % 7
    return model.fit(ids, X[:32, :3], epochs=3, verbose=0, shuffle=False).history["loss"]
