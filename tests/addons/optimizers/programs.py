"""Trainings of a small model with layers of odd sizes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

BATCHES = 20
ATTENTION = {"query/kernel": 1, "attention_output/kernel": 2}
PLAN = {
    "table/embeddings": "vocabulary",
    "up/kernel": "column",
    "up/bias": "column",
    "down/kernel": "row",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Muon": {"learning_rate": 0.02, "exclude_layers": ["answer"]},
    "Lamb": {"learning_rate": 0.02, "weight_decay": 0.01},
    "Adafactor": {"learning_rate": 0.05},
    "ScheduleFreeAdamW": {"learning_rate": 0.02, "warmup_steps": 3},
    "SGD": {"learning_rate": 0.05},
}


def model_of(*, flat: bool = False) -> keras.Model:
    """A model; with `flat`, the kernels of attention are matrices, with the same values."""
    from keras.layers import Dense, EinsumDense

    width, heads, size = 12, 3, 5
    ids = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(11, width, name="table")(ids)
    if flat:
        y = Dense(heads * size, use_bias=False, name="query")(x)
        x = x + Dense(width, use_bias=False, name="attention_output")(y)
    else:
        y = EinsumDense("bsd,dhk->bshk", (None, heads, size), name="query")(x)
        x = x + EinsumDense("bshk,hkd->bsd", (None, width), name="attention_output")(y)
    y = Dense(18, activation="gelu", name="up")(x)
    x = x + Dense(width, name="down")(y)
    x = keras.layers.Flatten()(x)
    return keras.Model(ids, Dense(7, name="answer")(x), name="model")


def data(rows: int = BATCHES * 10 - 3):
    random = np.random.default_rng(5)
    return random.integers(0, 11, (rows, 5)), random.integers(0, 7, rows)


def prepared(on, optimizer, *, split: bool = False, flat: bool = False, **options) -> keras.Model:
    import tfdist

    with on.scope():
        model = model_of(flat=flat)
        random = np.random.default_rng(1)
        model.set_weights([random.normal(0, 0.2, each.shape) for each in model.get_weights()])
        if split:
            tfdist.parallelize(model, PLAN)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, **options)
    return model


def weights_of(model: keras.Model) -> list:
    import tfdist

    return [tfdist.sharding.whole_value(variable).numpy() for variable in model.weights]


def train(on, optimizer: keras.optimizers.Optimizer, **options) -> list:
    """The whole weights after 20 batches, the last of which is smaller."""
    model = prepared(on, optimizer, **options)
    x, y = data()
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    return weights_of(model)


def made(kind: str, *, addon: bool = True, **options) -> keras.optimizers.Optimizer:
    from tfdist.addons import optimizers

    home: Any = optimizers if addon else keras.optimizers
    return getattr(home, kind)(**OPTIONS[kind], **options)


def alone(kind: str, **options) -> list:
    from tfdist.strategies import LocalStrategy

    return train(LocalStrategy(), made(kind, addon=False, **options))


def flat_attention() -> list:
    from tfdist.strategies import LocalStrategy

    return train(LocalStrategy(), made("Muon", addon=False), flat=True)


def strategy_of(mesh: dict, zero_stage: int):
    import tfdist
    from tfdist.testing import strategy

    return strategy(tfdist.Mesh(**mesh), zero_stage=zero_stage)


def is_split(mesh: dict) -> bool:
    return mesh.get("tensor", 1) > 1


def on_rank(kind: str, mesh: dict, zero_stage: int, options: dict) -> list:
    return train(strategy_of(mesh, zero_stage), made(kind, **options), split=is_split(mesh))


def other_steps(way: str, mesh: dict, zero_stage: int) -> list:
    optimizer: Any = made("Muon")
    options: dict[str, Any] = {"jit_compile": way == "compiled", "run_eagerly": way == "eager"}
    if way == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    if way == "several":
        kinds = keras.optimizers.OptimizerMap(optimizer, {".*embeddings": made("Lamb")})
        optimizer = keras.optimizers.MultiOptimizer(kinds)
    on = strategy_of(mesh, zero_stage)
    return train(on, optimizer, split=is_split(mesh), **options)


def orthogonalized(zero_stage: int) -> int:
    """The multiplications of this rank's Newton-Schulz iterations in a step of a transformer's shapes."""
    from unittest import mock

    from tfdist.addons.optimizers import Muon

    done: list[int] = []
    original = Muon.zeropower_via_newtonschulz5

    def counted(self, x, steps):
        rows, columns = sorted(x.shape)
        done.append(steps * (2 * rows * rows * columns + rows**3))
        return original(self, x, steps)

    on = strategy_of({}, zero_stage)
    with mock.patch.object(Muon, "zeropower_via_newtonschulz5", counted):
        with on.scope():
            layers: list = [keras.Input((64,))]
            for _ in range(3):
                layers += [keras.layers.Dense(64, use_bias=False) for _ in range(4)]
                layers += [keras.layers.Dense(size, use_bias=False) for size in (172, 172, 64)]
            model = keras.Sequential(layers)
            model.compile(Muon(0.01), "mse", run_eagerly=True)
        done.clear()
        model.fit(np.ones((4, 64)), np.ones((4, 64)), batch_size=4, verbose=0)
    return sum(done)


def one_more_epoch(kind: str, mesh: dict, zero_stage: int, folder: str, epochs: int) -> list:
    """Weights after so many epochs, of which those that a checkpoint has are not repeated."""
    import tfdist

    model = prepared(strategy_of(mesh, zero_stage), made(kind), split=is_split(mesh))
    x, y = data(40)
    saver = tfdist.callbacks.Checkpointer(folder, every_steps=4)
    model.fit(x, y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=[saver])
    return weights_of(model)


def refused_twice() -> list[str]:
    on = strategy_of({}, 1)
    model, said = prepared(on, made("Adafactor")), []
    x, y = data(10)
    for _ in range(2):
        try:
            model.fit(x, y, batch_size=10, verbose=0)
        except ValueError as error:
            said.append(str(error))
    return said


def in_16_bits() -> list[tuple[np.ndarray, np.ndarray]]:
    """The weights in bfloat16 after some steps, with the add-on's Muon and with Keras'."""
    found = []
    for addon in (True, False):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6,), dtype="bfloat16")]
        layers += [keras.layers.Dense(size, dtype="bfloat16") for size in (10, 3)]
        model = keras.Sequential(layers)
        model.compile(made("Muon", addon=addon), "mse")
        x = np.random.default_rng(2).normal(size=(40, 6))
        model.fit(x, x[:, :3], batch_size=10, shuffle=False, verbose=0)
        found.append([np.asarray(each, "float32") for each in model.get_weights()])
    return list(zip(*found, strict=True))


def several_dtypes(kind: str, zero_stage: int) -> list:
    """The weights of a model in bfloat16 with an answer in float32."""
    import tfdist

    strategy = tfdist.strategies.LocalStrategy() if kind != "auto" else strategy_of({}, zero_stage)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(10, dtype="bfloat16")]
        model = keras.Sequential([*layers, keras.layers.Dense(3, dtype="float32")])
        optimizer: Any = keras.optimizers.Lamb if kind != "auto" else None
        model.compile(made("Lamb", addon=optimizer is None), "mse")
    x = np.random.default_rng(2).normal(size=(40, 6))
    model.fit(x, x[:, :3], batch_size=10, shuffle=False, verbose=0)
    return [np.asarray(each, "float32") for each in model.get_weights()]


def small_vocabulary(mesh: dict) -> list:
    import tfdist

    strategy: Any = strategy_of(mesh, 0) if mesh else tfdist.strategies.LocalStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(2, 12, name="table")]
        layers += [keras.layers.Flatten(), keras.layers.Dense(3, name="answer")]
        model = keras.Sequential(layers)
        if mesh:
            tfdist.parallelize(model, {".*table/embeddings": "vocabulary"})
        model.compile(made("Adafactor", addon=bool(mesh)), "mse")
    x = np.random.default_rng(2).integers(0, 2, (40, 5))
    model.fit(x, x[:, :3], batch_size=10, shuffle=False, verbose=0)
    return weights_of(model)


def saved_in_a_pipeline(folder: str) -> str:
    import tfdist

    with strategy_of({"data": 1, "pipeline": 2}, 0).scope():
        layers = [keras.Input((6,)), *(keras.layers.Dense(6) for _ in range(4))]
        model = tfdist.pipeline.PipelineModel(keras.Sequential(layers), num_microbatches=2)
        model.compile(made("Adafactor"), "mse")
    x = np.ones((8, 6), "float32")
    try:
        model.fit(x, x, verbose=0, callbacks=[tfdist.callbacks.Checkpointer(folder)])
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def refusal() -> str:
    try:
        on_rank("Adafactor", {}, 1, {})
    except ValueError as error:
        return str(error)
    return "nothing was refused"
