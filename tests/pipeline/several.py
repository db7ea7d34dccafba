"""Models with several inputs and outputs, alike on one process and as a pipeline on any mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.models.gpt_programs import scope, whole
from tests.parity.families import _CLASSES, FAMILIES, LENGTH, WORDS, classifier, rows_for
from tests.parity.feeding import Feed

STEPS, BATCH, CLASSES = 10, 4, 3


@dataclasses.dataclass
class Outcome:
    history: dict[str, list[float]]
    evaluation: dict[str, float]
    predictions: Any
    weights: list[np.ndarray]
    own_variables: int
    stages: list[list[str]] | None


def _inputs(**shapes):
    return {
        name: keras.Input(shape, name=name, dtype="int32" if name == "ids" else "float32")
        for name, shape in shapes.items()
    }


def two_in():
    """The second input is read at the end."""
    x = _inputs(left=(6,), right=(3,))
    y = keras.layers.Dense(8, activation="tanh", name="first")(x["left"])
    y = keras.layers.Dense(8, activation="tanh", name="second")(y)
    y = keras.layers.Concatenate(name="join")([y, x["right"]])
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(y))


def two_out():
    """One output is made early, a probability; another is an input, and one has no loss."""
    x = _inputs(left=(6,), right=(3,))
    y = keras.layers.Dense(8, activation="tanh", name="first")(x["left"])
    early = keras.layers.Dense(CLASSES, activation="softmax", name="early")(y)
    y = keras.layers.Dense(8, activation="tanh", name="second")(y)
    flag = keras.layers.Dense(1, activation="sigmoid", name="flag")(y)
    y = keras.layers.Dense(8, activation="tanh", name="third")(y)
    y = keras.layers.Concatenate(name="join")([y, x["right"]])
    late = keras.layers.Dense(CLASSES, name="late")(y)
    return keras.Model(x, {"late": late, "early": early, "same": x["right"], "flag": flag})


def listed_out():
    """Inputs in a list, outputs in one: losses go by the layers' names."""
    x = _inputs(left=(6,), right=(3,))
    y = keras.layers.Dense(8, activation="tanh", name="first")(x["left"])
    early = keras.layers.Dense(CLASSES, name="early")(y)
    y = keras.layers.Dense(8, activation="tanh", name="second")(y)
    y = keras.layers.Concatenate(name="join")([y, x["right"]])
    return keras.Model(
        [x["left"], x["right"]], [early, keras.layers.Dense(CLASSES, name="late")(y)]
    )


class Bias(keras.layers.Layer):
    """A bias for each pair of positions, the same for all rows, with a weight of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH,), name="table")

    def call(self, x):
        return self.table[None, :, None] + tf.zeros_like(self.table)[None, None, :]

    def compute_output_spec(self, x):
        return keras.KerasTensor((1, LENGTH, LENGTH), self.compute_dtype)


class Block(keras.layers.Layer):
    """Reads tokens, a mask, a bias and pictures of another branch; hands on a running mean."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(width, activation="tanh")
        self.outer = keras.layers.Dense(width)

    def call(self, x, mean, bias, mask, others):
        weights = keras.ops.softmax(bias + 9.0 * (keras.ops.cast(mask, "float32")[:, None, :] - 1))
        y = keras.ops.matmul(weights, self.inner(x)) + others[:, None, :]
        return x + self.outer(y), 0.5 * (mean + y)


def shared():
    """Tokens and a mean that blocks hand on, a bias, a mask and an encoder's output that they share."""
    x = _inputs(ids=(LENGTH,), right=(3,))
    others = keras.layers.Dense(8, activation="tanh", name="encoder1")(x["right"])
    others = keras.layers.Dense(8, activation="tanh", name="encoder2")(others)
    y = keras.layers.Embedding(WORDS, 8, name="tokens")(x["ids"])
    mask = keras.ops.not_equal(x["ids"], 0)
    bias, mean = Bias(name="bias")(y), keras.layers.Dense(8, name="mean")(y)
    for number in range(3):
        y, mean = Block(8, name=f"block{number}")(y, mean=mean, bias=bias, mask=mask, others=others)
    y = keras.layers.Add(name="both")([y, mean])
    y = keras.layers.GlobalAveragePooling1D(name="pool")(y)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(y))


def nested():
    """A model inside that is called twice, with a part that is not used, and a table that is tied."""
    inside = _inputs(ids=(LENGTH,), extra=(LENGTH, 8))
    table = keras.layers.Embedding(WORDS, 8, name="table")
    y = keras.layers.Add(name="plus")([table(inside["ids"]), inside["extra"]])
    y = keras.layers.Dense(
        8, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2", name="inner"
    )(y)
    unused = keras.layers.Dense(2, name="unused")(y)
    part = keras.Model(inside, {"y": y, "unused": unused}, name="part")
    x = _inputs(ids=(LENGTH,), right=(3,))
    extra = keras.layers.Dense(8, activation="tanh", name="widen")(x["right"])
    extra = keras.layers.RepeatVector(LENGTH, name="repeat")(extra)
    y = part({"ids": x["ids"], "extra": extra})["y"]
    y = part({"ids": x["ids"], "extra": y})["y"]
    stack = [
        keras.Input((LENGTH, 8)),
        keras.layers.Dense(8, name="a"),
        keras.layers.Dense(8, name="b"),
    ]
    y = keras.layers.Concatenate(name="join")(
        [keras.Sequential(stack, name="stack")(y), table(x["ids"])]
    )
    y = keras.layers.Flatten(name="flat")(y)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(y))


def windows():
    """Between layers each row is three windows, of which there are then more than rows."""
    x = _inputs(left=(6,), right=(3,))
    y = keras.ops.reshape(x["left"], (-1, 2))
    for number in range(4):
        y = keras.layers.Dense(4, activation="tanh", name=f"part{number}")(y)
    y = keras.ops.reshape(y, (-1, 12))
    y = keras.layers.Concatenate(name="join")([y, x["right"]])
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(y))


def stopped():
    """Nothing leads back to the first layers but by an early output; one output is of integers."""
    x = _inputs(left=(6,), right=(3,))
    y = keras.layers.Dense(8, activation="tanh", name="first")(x["left"])
    early = keras.layers.Dense(CLASSES, name="early")(y)
    kind = keras.ops.argmax(early, axis=-1)
    y = keras.layers.Dense(8, activation="tanh", name="second")(keras.ops.stop_gradient(y))
    y = keras.layers.Concatenate(name="join")([y, x["right"]])
    y = keras.layers.Dense(8, activation="tanh", name="third")(y)
    late = keras.layers.Dense(CLASSES, name="late")(y)
    return keras.Model(x, {"late": late, "early": early, "kind": kind})


MADE = (two_in, two_out, listed_out, shared, nested, windows, stopped)
HAND_MADE = {f.__name__: f for f in MADE}


def lm(name: str):
    """A language model of KerasHub."""
    import keras_hub

    kind = _CLASSES.get(name, name)
    backbone = getattr(keras_hub.models, f"{kind}Backbone")(**FAMILIES[name])
    task = getattr(keras_hub.models, f"{kind}CausalLM")
    return task(backbone=backbone, preprocessor=None, compile=False)


def build(kind: str):
    family, _, what = kind.partition("-")
    if family in HAND_MADE:
        return HAND_MADE[family]()
    return lm(family) if what == "lm" else classifier(family)


def data_of(kind: str, rows: int):
    """Inputs and targets."""
    random = np.random.default_rng(5)
    family, _, what = kind.partition("-")
    if family not in HAND_MADE:
        x = rows_for(family, rows)
        return x, random.integers(0, WORDS, (rows, LENGTH)) if what == "lm" else _classes(rows)
    x = {
        "ids": random.integers(0, WORDS, (rows, LENGTH)).astype("int32"),
        "left": random.normal(size=(rows, 6)).astype("float32"),
        "right": random.normal(size=(rows, 3)).astype("float32"),
    }
    y = _classes(rows)
    if kind == "two_out":
        y = {"late": y, "early": y[::-1].copy(), "flag": (y > 0).astype("float32")[:, None]}
        y["same"] = x["right"]
    if kind == "stopped":
        y = {"late": y, "early": y[::-1].copy(), "kind": y}
    x.pop("left" if kind in ("shared", "nested") else "ids")
    return (tuple(x.values()), (y, y[::-1].copy())) if kind == "listed_out" else (x, y)


def _classes(rows: int):
    return np.random.default_rng(6).integers(0, CLASSES, rows)


def compiled(kind: str) -> dict:
    """Losses and metrics."""
    probabilities = keras.losses.SparseCategoricalCrossentropy()
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind == "two_out":
        return {
            "loss": {"late": logits, "early": probabilities, "flag": "binary_crossentropy"},
            "loss_weights": {"late": 1.0, "early": 0.5, "flag": 0.3},
            "metrics": {"late": ["accuracy"], "same": ["mse"]},
        }
    if kind == "stopped":
        return {"loss": {"late": logits, "early": logits}}
    if kind == "listed_out":
        return {"loss": {"late": logits, "early": logits}, "metrics": {"early": ["accuracy"]}}
    # The tasks of KerasHub have others by default.
    return {"loss": logits, "metrics": ["accuracy"], "weighted_metrics": None}


def train(
    mesh: dict | None,
    kind: str,
    *,
    pipeline: dict | None = None,
    optimizer: str = "sgd",
    policy: str | None = None,
    recompute: str | None = None,
    parallelize: bool = False,
    weighted: bool = False,
    order: str = "given",
) -> Outcome:
    """Ten steps, each an epoch, with the rows of a batch in one of `ORDERS`.

    `pipeline` are the arguments of a PipelineModel.
    """
    import tfdist
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    before = keras.config.dtype_policy()
    if policy:
        keras.config.set_dtype_policy(policy)
    stages = None
    try:
        with scope(mesh):
            if pipeline is None or parallelize:
                model = build(kind)
            else:
                with deferred_weights():
                    model = build(kind)
            if parallelize:
                tfdist.parallelize(model)
            if recompute is not None:
                tfdist.recompute.recompute(model, recompute)
            if pipeline is not None:
                model = PipelineModel(model, **{"num_microbatches": 2, **pipeline})
                partition = model.partition
                stages = [
                    [k.name for k in partition.segments(s)] for s in range(partition.num_stages)
                ]
            kinds = {
                "sgd": lambda: keras.optimizers.SGD(0.05),
                "adamw": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=1.0),
            }
            model.compile(kinds[optimizer](), **compiled(kind))
    finally:
        keras.config.set_dtype_policy(before)
    x, y = data_of(kind, STEPS * BATCH)
    parts: tuple = (x, y)
    if weighted:
        parts += (np.random.default_rng(1).uniform(0.5, 2, STEPS * BATCH).astype("float32"),)
    parts = Feed("data", STEPS * BATCH, BATCH, order).arranged(parts)
    data = tf.data.Dataset.from_tensor_slices(parts)
    # KerasHub's models know the number of rows, the others do not.
    data = data.batch(BATCH, drop_remainder=kind not in HAND_MADE)
    history = model.fit(data.repeat(), steps_per_epoch=1, epochs=STEPS, verbose=0)
    some = tf.nest.map_structure(lambda array: array[:11], (x, y))
    evaluation = model.evaluate(*some, batch_size=BATCH, verbose=0, return_dict=True)
    predictions = model.predict(some[0], batch_size=BATCH, verbose=0)
    own = len(model.variables)
    weights = whole((model if pipeline is None else model.chain_model).weights)
    return Outcome(history.history, evaluation, predictions, list(weights.values()), own, stages)


def save(mesh: dict, kind: str, folder: str) -> list[np.ndarray]:
    """Saves a model that was trained for a step, whole and its weights; returns these."""
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        with deferred_weights():
            model = build(kind)
        model = PipelineModel(model, num_microbatches=2)
        model.compile("sgd", **compiled(kind))
    x, y = data_of(kind, BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/w.weights.h5")
    return list(whole(model.chain_model.weights).values())


def load(mesh: dict | None, kind: str, folder: str) -> list[np.ndarray]:
    """The weights of what `save` has written: of the whole file, or on a mesh of the weights' file."""
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    if mesh is None:
        model = keras.saving.load_model(f"{folder}/model.keras")
        x, _ = data_of(kind, BATCH)
        model.predict(x, verbose=0)
        return list(whole(model.weights).values())
    with scope(mesh):
        model = PipelineModel(build(kind), num_microbatches=2)
        model.load_weights(f"{folder}/w.weights.h5")
    return list(whole(model.chain_model.weights).values())


def refusal(mesh: dict, what: str) -> str:
    """What is said where a pipeline cannot be, or of a batch that it does not take."""
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    kind = "GPT2-lm"
    x, y = data_of(kind, 2 * BATCH)
    options: dict[str, Any] = {"cut": [4, 3]} if what == "shape" else {}
    with scope(mesh):
        try:
            if what == "rows":
                kind = "shared"
                inputs = keras.Input((LENGTH, 4))
                hidden = keras.layers.Dense(4)(keras.layers.Dense(4)(inputs))
                found = keras.Model(inputs, [hidden, Bias()(keras.layers.Dense(2)(inputs))])
                x = np.zeros((BATCH, LENGTH, 4), "float32")
                model = PipelineModel(found, num_microbatches=2)
                model.compile("sgd", "mse")
                model.predict(x, verbose=0)
            model = PipelineModel(build(kind), num_microbatches=2, **options)
            model.compile("sgd", **compiled(kind))
            if what == "inputs":
                x = {"token_ids": x["token_ids"]}
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
            if what == "shape":
                spec = tf.nest.map_structure(
                    lambda s: tf.TensorSpec((BATCH, None), s.dtype), data.element_spec
                )
                data = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=spec)
            model.fit(data, verbose=0)
        except (ValueError, RuntimeError, tf.errors.InvalidArgumentError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was refused"
