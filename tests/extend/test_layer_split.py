"""A user's layers, split by `tfdist.parallelize` as the user's `LayerSplit` says."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

import tfdist
from tests.conftest import on_ranks
from tfdist.extend import (
    LayerSplit,
    Split,
    copy_to_region,
    reduce_from_region,
    register_split,
)

WIDTH, HIDDEN, STEPS = 6, 8, 3
TWO = {"data": 1, "tensor": 2}


class GLU(keras.layers.Layer):
    """silu(beta * (x Wg)) * (x Wu), and Wd back to the width, plus a bias."""

    def __init__(self, hidden: int, **options):
        super().__init__(**options)
        self.hidden = hidden

    def build(self, shape):
        width = shape[-1]
        self.gate = self.add_weight(shape=(width, self.hidden), name="gate")
        self.up = self.add_weight(shape=(width, self.hidden), name="up")
        self.down = self.add_weight(shape=(self.hidden, width), name="down")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")
        self.beta = self.add_weight(shape=(), initializer="ones", name="beta")

    def product(self, x):
        gate = ops.silu(self.beta * ops.matmul(x, self.gate))
        return ops.matmul(gate * ops.matmul(x, self.up), self.down)

    def call(self, x):
        return self.product(x) + self.bias


class SplitGLU(LayerSplit):
    """The hidden units are split; the bias is added after the sum, or a part of it by each rank."""

    kinds = ("gated", "gated, with parts of the bias")

    def __init__(self, **rules):
        self.rules = rules

    def weights(self, layer, kind):
        split = {"gate": Split(1), "up": Split(-1, multiple_of=2), "down": Split(0)}
        bias = "whole" if kind == "gated" else "partial"
        rules = {**split, "bias": bias, "beta": "partial", **self.rules}
        return {path: rule for path, rule in rules.items() if rule is not None}

    def call(self, layer, kind, group, original, x):
        part = layer.product(copy_to_region(x, group))
        if kind == "gated":
            return reduce_from_region(part, group) + layer.bias
        return reduce_from_region(part + layer.bias / group.size, group)


class Block(keras.layers.Layer):
    """Two Dense layers, computed by its own call."""

    def __init__(self, hidden: int, **options):
        super().__init__(**options)
        self.wide = keras.layers.Dense(hidden, "gelu", name="wide")
        self.narrow = keras.layers.Dense(3, use_bias=False, name="narrow")

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], self.wide.units))

    def call(self, x):
        return self.narrow(self.wide(x))


class SplitBlock(LayerSplit):
    """The layers inside compute with slices, in the layer's own call."""

    kinds = ("block",)

    def weights(self, layer, kind):
        return {"wide/kernel": Split(1), "wide/bias": Split(0), "narrow/kernel": Split(0)}

    def attributes(self, layer, kind, group):
        return {"wide/units": layer.wide.units // group.size, "narrow/input_spec": None}

    def call(self, layer, kind, group, original, *args, **kwargs):
        (x,) = args
        assert layer.wide.units == HIDDEN // group.size
        return reduce_from_region(original(copy_to_region(x, group), **kwargs), group)


class Units(keras.layers.Layer):
    """A product whose output may stay split."""

    def __init__(self, units: int, **options):
        super().__init__(**options)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        return ops.matmul(x, self.kernel)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)


class SplitUnits(LayerSplit):
    kinds = ("column", "row")

    def weights(self, layer, kind):
        return {"kernel": Split(1 if kind == "column" else 0)}

    def output_dim(self, layer, kind):
        return -1 if kind == "column" else None

    def call(self, layer, kind, group, original, x):
        if kind == "column":
            return original(copy_to_region(x, group))
        return reduce_from_region(original(x), group)


def register() -> None:
    """In each process, ranks and the one that they are compared with."""
    register_split(GLU, SplitGLU())
    register_split(Block, SplitBlock())
    register_split(Units, SplitUnits())


def model_of(*layers) -> keras.Model:
    x = inputs = keras.Input((WIDTH,), name="x")
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def glu():
    return model_of(GLU(HIDDEN, name="glu"), keras.layers.Dense(3, name="head"))


def block():
    return model_of(Block(HIDDEN, name="block"))


def units():
    return model_of(Units(HIDDEN, name="in"), keras.layers.ReLU(), Units(3, name="out"))


#: By name: the model, its plan, and the weights of which a rank holds a half.
CASES = {
    "whole bias": (glu, {"glu/(gate|up|down)": "gated"}, {"glu/gate", "glu/up", "glu/down"}),
    "partial bias": (
        glu,
        {"glu/.*": "gated, with parts of the bias"},
        {"glu/gate", "glu/up", "glu/down"},
    ),
    "layers inside": (
        block,
        {"block/.*/kernel": "block"},
        {"block/wide/kernel", "block/wide/bias", "block/narrow/kernel"},
    ),
    "found block": (block, None, {"block/wide/kernel", "block/wide/bias", "block/narrow/kernel"}),
    "two kinds": (
        units,
        {"in/kernel": "column", "out/kernel": "row"},
        {"in/kernel", "out/kernel"},
    ),
}


def scope(mesh: dict | None):
    if mesh is None:
        return contextlib.nullcontext()
    from tfdist.testing import strategy

    return strategy(tfdist.Mesh(**mesh)).scope()


def train(name: str, mesh: dict | None = None):
    """Three steps: losses, global weights, and the sizes of what this rank holds."""
    from tfdist.sharding import whole_value

    register()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    build, plan, _ = CASES[name]
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(12, WIDTH)), chance.normal(size=(12, 3))
    with scope(mesh):
        model = tfdist.parallelize(build(), plan)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(x, y, batch_size=4, epochs=STEPS, shuffle=False, verbose=0).history
    weights = {weight.path: whole_value(weight).numpy() for weight in model.weights}
    sizes = {weight.path: int(np.prod(weight.shape)) for weight in model.weights}
    report = {row.path: row for row in tfdist.tensor_parallel.report(model).variables}
    assert {path: int(np.prod(row.local_shape)) for path, row in report.items()} == sizes
    # A model built on the split one has its shapes.
    inputs = keras.Input((WIDTH,))
    assert keras.Model(inputs, model(inputs)).output_shape == (None, 3)
    return history["loss"], weights, sizes


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_one_process(pool, one_process, name):
    ((losses, weights, sizes),) = one_process.run(train, name, timeout=200)
    assert losses[-1] < losses[0]
    for own_losses, own_weights, own_sizes in pool.run(train, name, TWO, timeout=200):
        np.testing.assert_allclose(own_losses, losses, atol=1e-5)
        for path, value in weights.items():
            np.testing.assert_allclose(own_weights[path], value, atol=1e-5, err_msg=path)
            share = 2 if path in CASES[name][2] else 1
            assert own_sizes[path] * share == sizes[path], path


class Squared(GLU):
    def call(self, x):
        return super().call(x) ** 2


#: The rules that differ, what builds the model, and what the message says.
WRONG = {
    "an unnamed weight": ({"bias": None}, glu, ("must name every trainable weight", "'bias'")),
    "a weight that is not there": ({"biases": "whole"}, glu, ("'biases'", "'gate', 'up'")),
    "no such dim": ({"gate": Split(2)}, glu, ("must name a dim", "'gate'", "(6, 8)")),
    "another call": ({}, lambda: model_of(Squared(8, name="glu")), ("Squared", "Register one")),
    "a class": ({"gate": Split}, glu, ("must return Split, 'whole' or 'partial'", "'gate'")),
}
WRONG_ON_RANKS = {
    "not divisible": (
        {},
        lambda: model_of(GLU(7, name="glu")),
        ("must be divisible by", "`glu/gate` of shape (6, 7)", "tensor=2"),
    ),
    "not a multiple": (
        {},
        lambda: model_of(GLU(6, name="glu")),
        ("must be divisible by", "multiple_of=2", "`glu/up`", "(6, 6)"),
    ),
    "partial, said to be whole": ({"beta": "whole"}, glu, ("`glu/beta`", "Return 'partial'")),
    "whole, said to be partial": ({"bias": "partial"}, glu, ("gradients differ", "`glu/bias`")),
}


def refused(mesh: dict | None, name: str) -> tuple[str, bool]:
    """What is said of a wrong split, and whether the model is whole then."""
    rules, build, _ = {**WRONG, **WRONG_ON_RANKS}[name]
    register_split(GLU, SplitGLU(**rules))
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = build()
        before = model.get_weights()
        try:
            tfdist.parallelize(model, {"glu/(gate|up|down)": "gated"})
            message = "accepted"
        except (ValueError, TypeError) as error:
            message = str(error)
    same = all(map(np.array_equal, model.get_weights(), before))
    is_whole = "call" not in vars(model.get_layer("glu"))
    return message, same and is_whole


@pytest.mark.parametrize("name", WRONG)
def test_wrong_splits_are_refused_anywhere(name):
    message, unchanged = refused(None, name)
    assert unchanged
    assert "\n" not in message
    for part in (*WRONG[name][2], "Received: "):
        assert part in message


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", WRONG_ON_RANKS)
def test_wrong_splits_are_refused_on_ranks(pool, name):
    for message, unchanged in pool.run(refused, TWO, name, timeout=200):
        assert unchanged
        assert "\n" not in message
        for part in WRONG_ON_RANKS[name][2]:
            assert part in message


def deferred_and_quantized(mesh: dict) -> tuple[list, set, list]:
    """What a model without values has of its weights, and what quantizing a split layer raises."""
    from tfdist.pipeline import deferred_weights

    register()
    with scope(mesh):
        with deferred_weights():
            model = block()
        tfdist.parallelize(model)
    layer = model.get_layer("block")
    raised = []
    for method, argument in ((layer.wide.enable_lora, 2), (layer.narrow.quantize, "int8")):
        with pytest.raises(NotImplementedError) as caught:
            method(argument)
        raised.append(str(caught.value))
    return [tuple(w.shape) for w in model.weights], {layer.wide.units}, raised


@on_ranks(("horovod", 2))
def test_without_values_and_with_lora(pool):
    for shapes, units_outside, raised in pool.run(deferred_and_quantized, TWO, timeout=200):
        assert shapes == [(WIDTH, HIDDEN // 2), (HIDDEN // 2,), (HIDDEN // 2, 3)]
        assert units_outside == {HIDDEN}
        for message, name in zip(raised, ("enable_lora", "quantize"), strict=True):
            assert f"`{name}` is not supported" in message and "block/" in message


def test_plans_name_the_kinds_of_the_layers_class():
    register()
    with pytest.raises(ValueError, match=r"'gated'.*Received: 'gate' for the pattern"):
        tfdist.parallelize(glu(), {"glu/.*": "gate"})
    with pytest.raises(ValueError, match=r"GLU must use 'gated' or .* Received: 'block'"):
        tfdist.parallelize(glu(), {"glu/.*": "block"})
    with pytest.raises(ValueError, match=r"Dense must use .* Received: 'gated' for `head`"):
        tfdist.parallelize(glu(), {"head/.*": "gated"})
    with pytest.raises(
        ValueError, match=r"the same word for all variables of a layer.*'gated' for `glu/gate`"
    ):
        tfdist.parallelize(glu(), {"glu/gate": "gated", "glu/up": "replicate"})
    with pytest.raises(ValueError, match="register_split"):
        tfdist.parallelize(model_of(keras.layers.UnitNormalization(), Other()), {".*w": "column"})


class Other(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * self.w


def test_the_most_derived_class_decides():
    class Derived(GLU):
        pass

    class Words(SplitGLU):
        kinds = ("words",)

    register()
    plan = {"glu/gate": "words"}
    with pytest.raises(ValueError, match=r"Received: 'words'"):
        tfdist.parallelize(model_of(Derived(8, name="glu")), plan)
    register_split(Derived, Words())
    tfdist.parallelize(model_of(Derived(8, name="glu")), plan)
    with pytest.raises(ValueError, match=r"Received: 'words'"):
        tfdist.parallelize(glu(), plan)
    register_split(Derived, SplitGLU())
    with pytest.raises(ValueError, match=r"Received: 'words'"):
        tfdist.parallelize(model_of(Derived(8, name="glu")), plan)


def test_what_is_no_split_is_refused():
    class NoKinds(SplitGLU):
        kinds = "gated"

    class Replicates(SplitGLU):
        kinds = ("replicate",)

    for arguments in ((GLU(4), SplitGLU()), (dict, SplitGLU()), (GLU, SplitGLU), (GLU, NoKinds())):
        with pytest.raises(TypeError, match=r"must be .* Received: "):
            register_split(*arguments)
    with pytest.raises(ValueError, match="cannot contain 'replicate'"):
        register_split(GLU, Replicates())
    for wrong in ({"dim": "1"}, {"dim": 1, "multiple_of": 0}):
        with pytest.raises(ValueError, match="Received: "):
            Split(**wrong)
