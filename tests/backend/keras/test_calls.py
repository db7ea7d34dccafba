"""The calls of a functional model, and of the models inside."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras.src.models.functional import Functional
from keras.src.ops.node import Node

from tfdist.backend.keras.calls import calls_of, flat_inputs, model_of


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (Functional, "_standardize_inputs", ["self", "inputs"]),
        (Node, "__init__", ["self", "operation", "call_args", "call_kwargs", "outputs"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_take_what_they_took(owner, name, parameters):
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[: len(parameters)] == parameters


def test_functional_models_know_their_calls():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="only")(inputs))
    (call,), outputs = calls_of(model)
    assert call.operation.name == "only"
    assert call.reads == (inputs,)
    assert list(call.makes) == outputs == model.outputs


def inner():
    """Two named inputs, of another dtype than what comes, and two outputs of which one is wanted."""
    a, b = keras.Input((3,), name="a"), keras.Input((3,), dtype="float64", name="b")
    y = keras.layers.Dense(3, name="first")(a)
    z = keras.layers.Dense(2, name="unused")(y)
    return keras.Model({"a": a, "b": b}, {"y": keras.layers.Add(name="add")([y, b]), "z": z})


def outer():
    x = keras.Input((3,), name="x")
    part = inner()
    stack = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="stacked")])
    once = part({"a": x, "b": stack(x)})["y"]
    twice = part(inputs={"a": once, "b": x})["y"]
    return keras.Model(x, keras.layers.Dense(2, name="head")(twice))


def test_models_inside_are_looked_into():
    model = outer()
    calls, outputs = calls_of(model)
    names = [call.operation.name for call in calls]
    assert names.count("first") == names.count("add") == 2
    assert names.count("stacked") == names.count("head") == 1
    assert not any(isinstance(call.operation, keras.Model) for call in calls)
    again = model_of(calls, model.inputs, outputs)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    np.testing.assert_array_equal(again([x]), model(x))
    # The model itself has kept its graph.
    copy = keras.Model.from_config(model.get_config())
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(copy(x), model(x))


class OwnCall(keras.Model):
    def call(self, x):
        return 2 * super().call(x)


def test_a_model_with_a_call_of_its_own_is_one_call():
    x = keras.Input((3,))
    y = keras.layers.Dense(3)(x)
    own = OwnCall(x, y, name="own")
    z = keras.Input((3,))
    calls, _ = calls_of(keras.Model(z, own(z)))
    assert [call.operation.name for call in calls] == ["own"]
    with pytest.raises(ValueError, match="`own` of type OwnCall with an overridden `call`"):
        calls_of(own)


def test_a_mask_from_outside_keeps_a_model_whole():
    x = keras.Input((3,), dtype="int32")
    part = keras.Sequential([keras.Input((3, 4)), keras.layers.LSTM(2)], name="part")
    for zero, names in ((True, ["part"]), (False, ["lstm"])):
        calls, _ = calls_of(keras.Model(x, part(keras.layers.Embedding(5, 4, mask_zero=zero)(x))))
        assert [call.operation.name.split("_")[0] for call in calls][-1:] == names


def test_inputs_come_in_any_form_that_keras_takes():
    model = inner()
    a, b = np.ones((2, 3), "int64"), np.zeros((2, 3), "float32")
    for given in ({"a": a, "b": b}, {"b": b, "a": a}):
        first, second = flat_inputs(model, given)
        assert (first.dtype.name, second.dtype.name) == ("float32", "float64")
        assert first.numpy().all() and not second.numpy().any()
    with pytest.raises(ValueError, match=r"not optional|a tensor for each input"):
        flat_inputs(model, {"a": a, "b": None})
