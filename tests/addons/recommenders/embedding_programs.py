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
    from tfdist.addons.recommenders import FeatureConfig, ShardedEmbedding, TableConfig

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
            # Adam and Lion turn gradients of rounding into steps of a size of their own.
            rate = 0.05 if optimizer in ("sgd", "adagrad") else 0.005
            config = {"learning_rate": rate, **options}
            model.compile(
                keras.optimizers.get({"class_name": optimizer, "config": config}),
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


def features_of(placement: str) -> list:
    """Two features of one table, and one of another, which is a bag of any size."""
    from tfdist.addons.recommenders import FeatureConfig, TableConfig

    places, made = placement.split(), initializers()
    users = TableConfig("users", USERS, WIDTH, made["users"], "mean", places[0])
    items = TableConfig("items", ITEMS, NARROW, made["items"], "sum", places[1])
    return [
        FeatureConfig("user", users),
        FeatureConfig("friends", users),
        FeatureConfig("history", items),
    ]


def lookups(strategy, placement: str, form: str, first: int = 0, last: int = 13):
    """The vectors of rows `first` to `last`, and the gradients of the tables, by a call of one's own."""
    import tensorflow as tf

    from tfdist.addons.recommenders import FeatureConfig, ShardedEmbedding
    from tfdist.sharding import whole_value
    from tfdist.sharding.layout import layout_of

    start()
    chance = np.random.default_rng(3)
    bags = [chance.integers(0, ITEMS, size) for size in chance.integers(0, 4, 13)]
    weights = [chance.uniform(0.5, 2.0, len(bag)).astype("float32") for bag in bags]
    friends = chance.integers(0, USERS, (13, 2, 3))
    user = chance.integers(0, USERS, 13)
    place = slice(first, last)
    if strategy is not None:
        parts = np.array_split(np.arange(first, last), strategy.row_group.size)
        mine = parts[strategy.row_group.rank]
        place = slice(mine[0], mine[-1] + 1) if len(mine) else slice(0, 0)
    history = in_form([bag.astype("int32") for bag in bags[place]], form, PADDING)
    importance = in_form(weights[place], form, 0.0)
    with scope(strategy):
        features = features_of(placement)
        if form == "dense":
            features[-1] = FeatureConfig("history", features[-1].table, PADDING)
        layer = ShardedEmbedding(features, name="tables")
        tables = layer.tables

        def call(user, friends, history, importance):
            with tf.GradientTape() as tape:
                ids = {"user": user, "friends": friends, "history": history}
                found = layer(ids, weights={"history": importance})
                loss = tf.add_n([tf.reduce_sum(part**3) for part in found.values()])
            return found, tape.gradient(loss, [table.value for table in tables.values()])

        run = (
            tf.function(call)
            if strategy is None
            else tf.function(lambda *given: strategy.run(call, given))
        )
        found, gradients = run(
            tf.constant(user[place]), tf.constant(friends[place]), history, importance
        )
        whole = {}
        for (name, table), gradient in zip(tables.items(), gradients, strict=True):
            layout = layout_of(table)
            whole[name] = np.asarray(layout.all_gather(tf.convert_to_tensor(gradient)))
            whole[f"{name} value"] = whole_value(table).numpy()
    return {name: np.asarray(part) for name, part in found.items()}, whole


def in_form(bags: list, form: str, padding):
    """Bags as a ragged, a sparse or a dense tensor."""
    import tensorflow as tf

    flat = np.concatenate([*bags, np.zeros(0, np.asarray(padding).dtype.type)]).astype(
        "int32" if padding == PADDING else "float32"
    )
    ragged = tf.RaggedTensor.from_row_lengths(flat, [len(bag) for bag in bags])
    if form == "ragged":
        return ragged
    if form == "sparse":
        return ragged.to_sparse()
    return ragged.to_tensor(padding, [len(bags), 3])


def refusal(strategy, where: str, run_eagerly: bool = False) -> tuple[str, float]:
    """What `fit` says of an id that is outside of its vocabulary; and a sum over ranks after it."""
    import tensorflow as tf

    from tfdist.collectives import all_reduce

    start()
    x, y = data(20)
    x["history"][17, 3] = {"above": ITEMS, "below": -7}[where]
    with scope(strategy):
        model = build("rows columns table")
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=run_eagerly)
    try:
        model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        message = str(error)
    else:
        message = "nothing was refused"
    after = 1.0 if strategy is None else float(all_reduce(tf.constant(1.0), strategy.row_group))
    return message, after


def traffic(strategy, placement: str, kind: str) -> tuple[list[int], list[int]]:
    """The bytes that a rank sends to others in the exchanges of a step, counted and by the formula."""
    import unittest.mock

    import tensorflow as tf

    from tfdist.addons.recommenders import ShardedEmbedding

    start()
    group = strategy.row_group
    chance = np.random.default_rng(group.rank)
    user = chance.integers(0, USERS, 9)
    friends = chance.integers(0, USERS, (9, 2, 3))
    history = tf.ragged.constant([[1, 1, 2], [], [22], [5, 22]], dtype=tf.int32)
    ids = {"user": user, "friends": friends, "history": history}
    with strategy.scope():
        layer = ShardedEmbedding(features_of(placement), name="tables")
        tables = layer.tables
    engine = type(group.engine.transport(group))
    original, counted = engine.all_to_all_uneven, []

    def count(self, tensor, splits, *rest):
        away = tf.reduce_sum(splits) - splits[group.rank]
        counted.append(int(away) * tensor.dtype.size)
        return original(self, tensor, splits, *rest)

    with unittest.mock.patch.object(engine, "all_to_all_uneven", count):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(v) for v in layer(ids, training=kind != "unique").values()]
            )
        tape.gradient(loss, [table.value for table in tables.values()])

    asked = {
        "users": np.concatenate([user, friends.ravel()]),
        "items": history.values.numpy(),
    }
    if kind == "unique":
        asked = {name: np.unique(some) for name, some in asked.items()}
    requests = np.zeros((group.size, len(tables)), int)
    for number, (some, placed) in enumerate(zip(asked.values(), layer._placements, strict=True)):
        if placed.kind == "rows":
            owners = some // -(-layer._tables[number].vocabulary_size // group.size)
            requests[:, number] = np.bincount(owners, minlength=group.size)
        else:
            requests[:, number] = len(some)
            if placed.kind == "table":
                requests[np.arange(group.size) != placed.owner, number] = 0
    from tfdist.collectives import all_gather

    every = np.asarray(all_gather(tf.constant(requests[None]), group))  # [from, to, table]
    widths = [
        -(-table.embedding_dim // group.size) if placed.kind == "columns" else table.embedding_dim
        for table, placed in zip(layer._tables, layer._placements, strict=True)
    ]
    others = [rank for rank in range(group.size) if rank != group.rank]
    ids_out = sum(4 * (len(tables) + 3 + every[group.rank, rank].sum()) for rank in others)
    vectors_out = sum(4 * (every[rank, group.rank] * widths).sum() for rank in others)
    gradients_out = sum(4 * (every[group.rank, rank] * widths).sum() for rank in others)
    return counted, [int(ids_out), int(vectors_out), int(gradients_out)]


def recommender(mesh: dict | None, placement: str, optimizer: str = "adam"):
    """A compiled model with a built optimizer, and the data that it learns."""
    from tests.models.gpt_programs import scope as scope_of

    start(3)
    with scope_of(mesh):
        model = build(placement)
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
    return model, data(23)


def trained_and_saved(mesh: dict | None, placement: str, folder: str):
    """A checkpoint, and a file of Keras', after some steps; and the losses of further steps."""
    from tfdist import checkpoint

    model, (x, y) = recommender(mesh, placement)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    path = checkpoint.save(f"{folder}/saved", model, step=6)
    model.save_weights(f"{folder}/model.weights.h5")
    model.save(f"{folder}/model.keras")
    more = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return path, more.history["loss"]


def restored(mesh: dict | None, placement: str, path: str, file: str, folder: str):
    """Where a checkpoint was saved again, and the losses of further steps; the arrays of a file."""
    from tfdist import checkpoint

    model, (x, y) = recommender(mesh, placement)
    checkpoint.restore(path, model)
    again = checkpoint.save(folder, model, step=6)
    more = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.load_weights(file)
    return again, more.history["loss"], weights_of(model)


def plain_from_file(file: str) -> tuple[np.ndarray, np.ndarray]:
    """What a `.keras` file predicts in one process, and what plain embeddings with its tables do."""
    keras.backend.clear_session()
    model = keras.saving.load_model(file)
    x, _ = data(23)
    plain = build()
    tables = model.get_layer("tables").tables
    for layer in plain.layers:
        if isinstance(layer, keras.layers.Embedding):
            layer.set_weights([np.asarray(tables[layer.name])])
        elif isinstance(layer, keras.layers.Dense):
            layer.set_weights(model.get_layer(layer.name).get_weights())
    return model.predict(x, verbose=0), plain.predict(x, verbose=0)
