"""Plans that `parallelize` refuses, and what it says of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

from tests.tensor_parallel import parallel_programs as programs


def parallelize(*args, **kwargs):
    """tfdist's, imported where it is called: some processes that look at this file cannot."""
    from tfdist.tensor_parallel import parallelize as split

    return split(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a plan that is wrong for it, and what the message holds."""

    build: Callable
    plan: dict
    says: tuple[str, ...]


class OwnDense(keras.layers.Dense):
    def call(self, inputs):
        return super().call(inputs) ** 2


def stack(*layers, width: int = 6):
    """A functional model of layers in a row."""
    x = inputs = keras.Input((width,), name="x")
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def dense(units: int, name: str, **options):
    return keras.layers.Dense(units, name=name, **options)


def with_own_dense():
    return stack(OwnDense(4, name="own"))


def with_convolution():
    return keras.Sequential([keras.layers.Input((6, 6, 1)), keras.layers.Conv2D(4, 3, name="conv")])


def with_softmax():
    return stack(dense(4, "up", activation="softmax"), dense(4, "down"))


def regularized():
    rule = keras.regularizers.OrthogonalRegularizer()
    return stack(dense(8, "up", kernel_regularizer=rule), dense(6, "down"))


def fitted():
    model = programs.mlp()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


UP_DOWN = {"up/kernel": "column", "down/kernel": "row"}

#: On one device as well as on ranks.
ANYWHERE = {
    "no match": Case(
        programs.mlp,
        {"upp/kernel": "column"},
        ("'upp/kernel'", "does not match any variable", "up/kernel"),
    ),
    "a part of a path": Case(
        programs.mlp, {"kernel": "column"}, ("whole paths", "'up/kernel'", "'.*kernel.*'")
    ),
    "two match": Case(
        programs.mlp,
        {"up/.*": "column", ".*/bias": "replicate"},
        ("'up/.*'", "'.*/bias'", "both match 'up/bias'"),
    ),
    "unknown word": Case(programs.mlp, {"up/kernel": "columns"}, ("'columns'", "'column'")),
    "no expression": Case(programs.mlp, {"up/(": "column"}, ("regular expressions", "'up/('")),
    "another layer": Case(
        with_convolution, {".*conv/kernel": "column"}, ("Conv2D", "conv/kernel`")
    ),
    "a normalization": Case(
        programs.transformer, {"norm/gamma": "column"}, ("LayerNormalization", "`norm/gamma`")
    ),
    "an embedding's columns": Case(
        programs.transformer, {"table/.*": "column"}, ("'vocabulary'", "Embedding", "column")
    ),
    "a vocabulary of heads": Case(
        programs.transformer, {"attention/query/kernel": "vocabulary"}, ("EinsumDense",)
    ),
    "a layer of one's own": Case(with_own_dense, {"own/kernel": "column"}, ("`OwnDense`", "`own`")),
    "softmax": Case(with_softmax, {"up/kernel": "column"}, ("`softmax`", "`up`", "vocabulary")),
    "a regularizer of the whole": Case(regularized, UP_DOWN, ("kernel of `up`", "Orthogonal")),
    "only the bias": Case(programs.mlp, {"up/bias": "column"}, ("`up/kernel`",)),
    "two words": Case(
        programs.mlp,
        {"up/kernel": "column", "up/bias": "row"},
        ("'column' for `up/kernel`", "'row' for `up/bias`"),
    ),
    "a whole bias of columns": Case(
        programs.mlp, {"up/kernel": "column", "up/bias": "replicate"}, ("'replicate'", "`up/bias`")
    ),
    "a built optimizer": Case(fitted, programs.MLP, ("optimizer", "before its first `fit`")),
    "not built": Case(programs.Subclassed, {".*": "replicate"}, ("`subclassed`", "sample")),
}


def normalized():
    normalization = keras.layers.UnitNormalization(name="unit_length")
    return stack(dense(8, "up"), normalization, dense(6, "down"))


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.rate = self.add_weight(shape=(), initializer="ones", name="rate")

    def call(self, inputs):
        return inputs * self.rate


def scaled_inside_and_outside():
    scale = Scale(name="scale")
    return stack(scale, dense(8, "up"), scale, dense(6, "down"))


def built(model):
    model(np.zeros((1, 6), "float32"))
    return model


def three_heads():
    x = inputs = keras.Input((4, 6))
    return keras.Model(inputs, keras.layers.MultiHeadAttention(3, 2, name="attention")(x, x))


def split_before():

    model = programs.mlp()
    parallelize(model, programs.MLP)
    return model


class Penalty(keras.layers.Layer):
    """A mean over units, of which a rank would have its own."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.abs(x)))
        return x


def penalized():
    return stack(dense(8, "up"), Penalty(name="penalty"), dense(6, "down"))


def not_a_number():
    return stack(dense(8, "up"), dense(6, "down"), keras.layers.Lambda(lambda x: x / 0.0 * 0.0))


#: Where there is something to split.
ON_RANKS = {
    "heads": Case(
        three_heads,
        {"attention/query/kernel": "column"},
        ("num_heads=3", "`attention`", "tensor=2"),
    ),
    "units": Case(
        lambda: stack(dense(7, "up"), dense(6, "down")), UP_DOWN, ("units=7", "`up`", "tensor=2")
    ),
    "a split output": Case(
        lambda: stack(dense(8, "up")), {"up/kernel": "column"}, ("(2, 8), and has (2, 4)", "'row'")
    ),
    "column before a whole layer": Case(
        programs.mlp, {"up/kernel": "column"}, ("does not run", "'row' layer", "'down'")
    ),
    "row before column": Case(
        lambda: stack(dense(8, "up"), dense(6, "down")),
        {"down/kernel": "row"},
        ("`down` is split by rows", "of 8 in all", "4 units", "'column'"),
    ),
    "column after column": Case(
        lambda: stack(dense(8, "up"), dense(6, "down")),
        {"up/kernel": "column", "down/kernel": "column"},
        ("does not run", "'down'"),
    ),
    "a normalization of the slice": Case(
        normalized, UP_DOWN, ("does not compute the same", "output 0 differs", "unit_length")
    ),
    "a penalty of the slice": Case(
        penalized,
        UP_DOWN,
        ("does not compute the same", "a loss that a layer adds differs", "penalty"),
    ),
    "a weight inside and outside": Case(
        scaled_inside_and_outside,
        UP_DOWN,
        ("does not compute the same", "gradients differ, those of `scale/rate`"),
    ),
    "queries alone": Case(
        programs.transformer, {"attention/query/kernel": "column"}, ("does not run",)
    ),
    "no sample": Case(
        lambda: built(programs.Subclassed()), programs.SUBCLASSED, ("sample=...", "`subclassed`")
    ),
    "split already": Case(split_before, programs.MLP, ("`up/kernel` cannot be split twice",)),
    "no number": Case(not_a_number, UP_DOWN, ("NaN",)),
    "made outside of the scope": Case(programs.mlp, programs.MLP, ("the same `strategy.scope()`",)),
}


def on_a_rank(mesh: dict) -> dict[str, tuple[str, bool]]:
    """For each plan what is said, and whether the model computes what it did, whole."""

    found = {}
    for name, case in ON_RANKS.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(2)
        outside = case.build() if "made outside" in name else None
        with programs.scope(mesh):
            model = outside or case.build()
            before = [
                (np.array(weight), programs.layout_of(weight).slice) for weight in model.weights
            ]
            try:
                parallelize(model, case.plan)
                message = "accepted"
            except ValueError as error:
                message = str(error)
        unchanged = all(
            np.array_equal(np.array(weight), value) and programs.layout_of(weight).slice == sharding
            for weight, (value, sharding) in zip(model.weights, before, strict=True)
        )
        calls = [layer.name for layer in model._flatten_layers() if "call" in vars(layer)]
        found[name] = (message, unchanged and (not calls or name == "split already"))
    return found
