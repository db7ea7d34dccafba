"""Recommenders with tables of odd sizes: plain Keras in one process, `ShardedEmbedding` on ranks."""

from __future__ import annotations

import keras
import numpy as np

from tests.strategies.programs import scope, start

USERS, ITEMS, KINDS = 37, 23, 3
WIDTH, NARROW = 5, 4
BAG = 6
PADDING = -1


def data(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Ids that come twice in a batch and in a bag, bags without ids, weights; and targets."""
    chance = np.random.default_rng(seed)
    history = chance.integers(0, ITEMS, (rows, BAG))
    history[chance.random((rows, BAG)) < 0.4] = PADDING
    history[:, 1] = history[:, 0]
    history[::4] = PADDING
    inputs = {
        "user": chance.integers(0, USERS, rows) // 2,
        "item": chance.integers(0, ITEMS, (rows, 1)),
        "history": history,
        "kind": chance.integers(0, KINDS, (rows, 2)),
        "weight": chance.uniform(0.5, 2.0, (rows, BAG)).astype("float32"),
    }
    return inputs, chance.integers(0, 2, (rows, 1)).astype("float32")


def initializers() -> dict:
    kinds = keras.initializers
    return {
        "users": kinds.RandomUniform(-1.0, 1.0, seed=11),
        "items": kinds.GlorotUniform(seed=12),
        "kinds": kinds.RandomNormal(stddev=0.5, seed=13),
    }


def inputs_of() -> dict:
    return {
        "user": keras.Input((), dtype="int32", name="user"),
        "item": keras.Input((1,), dtype="int32", name="item"),
        "history": keras.Input((BAG,), dtype="int32", name="history"),
        "kind": keras.Input((2,), dtype="int32", name="kind"),
        "weight": keras.Input((BAG,), name="weight"),
    }


def plain_vectors(inputs: dict, is_weighted: bool) -> list:
    """By `keras.layers.Embedding`; the names of its tables are those of the sharded ones."""
    made = initializers()
    tables = {
        name: keras.layers.Embedding(rows, width, made[name], name=name)
        for name, rows, width in (
            ("users", USERS, WIDTH),
            ("items", ITEMS, WIDTH),
            ("kinds", KINDS, NARROW),
        )
    }
    history = inputs["history"]
    mask = keras.ops.cast(keras.ops.not_equal(history, PADDING), "float32")
    if is_weighted:
        mask = mask * inputs["weight"]
    bags = tables["items"](keras.ops.maximum(history, 0)) * mask[..., None]
    total = keras.ops.sum(mask, axis=1)[:, None]
    item = tables["items"](inputs["item"])[:, 0]
    mean = keras.ops.sum(bags, axis=1) / keras.ops.where(keras.ops.equal(total, 0.0), 1.0, total)
    kinds = tables["kinds"](inputs["kind"])
    return [tables["users"](inputs["user"]), item, mean, keras.ops.sum(kinds, axis=1)]


def sharded_vectors(inputs: dict, is_weighted: bool, placement: str) -> list:
    from tfdist.layers import FeatureConfig, ShardedEmbedding, TableConfig

    made, places = initializers(), placement.split()
    users, items, kinds = (
        TableConfig(name, rows, width, made[name], combiner, where)
        for name, rows, width, combiner, where in (
            ("users", USERS, WIDTH, None, places[0]),
            ("items", ITEMS, WIDTH, "mean", places[1]),
            ("kinds", KINDS, NARROW, "sum", places[2]),
        )
    )
    features = [
        FeatureConfig("user", users),
        FeatureConfig("item", items),
        FeatureConfig("history", items, PADDING),
        FeatureConfig("kind", kinds),
    ]
    ids = {feature.name: inputs[feature.name] for feature in features}
    weights = {"history": inputs["weight"]} if is_weighted else None
    vectors = ShardedEmbedding(features, name="tables")(ids, weights)
    return [vectors[name] for name in ("user", "item", "history", "kind")]


def build(placement=None, is_weighted: bool = True) -> keras.Model:
    """The model: of plain Keras where there is no placement."""
    inputs = inputs_of()
    if placement is None:
        vectors = plain_vectors(inputs, is_weighted)
    else:
        vectors = sharded_vectors(inputs, is_weighted, placement)
    hidden = keras.layers.Concatenate(name="joined")(vectors)
    initializer = keras.initializers.GlorotUniform(seed=21)
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=initializer, name="hidden")(hidden)
    initializer = keras.initializers.GlorotUniform(seed=22)
    outputs = keras.layers.Dense(1, kernel_initializer=initializer, name="logits")(hidden)
    return keras.Model(inputs, outputs)


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """The global arrays, by names that both kinds of model have."""
    from tfdist.sharding import whole_value

    found = {}
    for weight in model.weights:
        name = weight.path.replace("/embeddings", "").rpartition("tables/")[2]
        found[name] = whole_value(weight).numpy()
    return found


def train(strategy, *, placement=None, optimizer="sgd", rows=41, is_weighted=True, **options):
    """Twenty-one steps: history, evaluation, predictions, weights."""
    start()
    x, y = data(rows)
    policy = options.pop("policy", None)
    eager = options.pop("run_eagerly", False)
    keras.config.set_dtype_policy(policy or "float32")
    try:
        with scope(strategy):
            model = build(placement, is_weighted)
            rule = keras.optimizers.get(
                {"class_name": optimizer, "config": {"learning_rate": 0.05, **options}}
            )
            model.compile(
                rule,
                keras.losses.BinaryCrossentropy(from_logits=True),
                metrics=["accuracy"],
                run_eagerly=eager,
            )
    finally:
        keras.config.set_dtype_policy("float32")
    fitted = model.fit(x, y, batch_size=10, epochs=1 if eager else 4, shuffle=False, verbose=0)
    evaluation = model.evaluate(x, y, batch_size=7, verbose=0)
    predictions = model.predict(x, batch_size=7, verbose=0)
    return fitted.history, evaluation, predictions, weights_of(model)
