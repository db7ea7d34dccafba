"""Compares the results of a model before and after it is split, on a sample.

A plan can be wrong without raising an error: a layer that normalizes its features, given a slice of
them, normalizes the slice. No rule over layers detects that in an arbitrary model, but numbers do:
outputs and the gradients of all weights are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import own_losses, sublayers
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, all_reduce
from tfdist.sharding.layout import layout_of
from tfdist.sharding.weights import sum_gradient_over
from tfdist.tensor_parallel.adapters import override, per_rank_random
from tfdist.tensor_parallel.attributes import dtype_policy

#: The sizes of a generated sample that the model does not specify.
_BATCH, _OPEN = 2, 4
#: The relative difference of two equal computations in float32 that rounding may cause; and of gradients of
#: weights of 16 bits, which are rounded to these, as outputs are not.
_CLOSE, _CLOSE_IN_HALF = 1e-3, 1e-1
#: A gradient this much below the model's largest is a rounding error of zero.
_NEGLIGIBLE = 1e-3
#: Outputs beyond this represent minus infinity, such as masked logits.
_STANDS_FOR_INFINITY = 1e6

_ADVICE = (
    "A 'column' layer leaves each rank its part of the units for a 'row' layer; "
    "between the two, only layers that treat each unit, or each head, independently are supported."
)


@dataclasses.dataclass
class _Run:
    """The results of one run of the model.

    Attributes:
        outputs: The model's outputs, flat.
        gradients: The gradient of each weight; None where there is none.
        shapes: The shapes of a layer's inputs in each call, by the layer's id.
    """

    outputs: list[tf.Tensor]
    gradients: list[tf.Tensor | None]
    shapes: dict[int, list]


class Check:
    """Compares a model before and after it is split.

    Args:
        model: The model, whole, with the same values on every rank of the group.
        sample: An argument of `model(sample)`, the same on every rank; None to generate it.
        group: The tensor ranks.

    Raises:
        ValueError: A sample must be generated, but the model does not specify its shape, or does not
            run on it.
    """

    def __init__(self, model: keras.Model, sample, group: Group):
        self._model = model
        self._group = group
        self._weights = [w for w in model.weights if keras.backend.is_float_dtype(w.dtype)]
        self._layers = all_layers(model, include_self=False)
        in_half = any(tf.as_dtype(weight.dtype).size < 4 for weight in self._weights)
        self._close = _CLOSE_IN_HALF if in_half else _CLOSE
        made_up = sample is None
        self._sample = _made_up_sample(model) if made_up else sample
        try:
            self._before = self._run()
        except (ValueError, TypeError, tf.errors.OpError) as error:
            if not made_up:
                raise
            raise ValueError(
                "The split model could not be compared with the model on a generated sample, on which "
                f"the model does not run. Pass one: parallelize(..., sample=...). Raised: {error}"
            ) from error
        if any(bool(tf.reduce_any(x != x)) for x in self._before.outputs):
            raise ValueError(
                "The comparison with the split model requires a sample for which the model's output is "
                f"not NaN. Received: NaN from `{model.name}`. Pass another sample: "
                "parallelize(..., sample=...)."
            )

    def compare(self, planned) -> None:
        """Runs the split model, compares it, and marks its layers and weights by the result.

        Layers between 'column' and 'row' draw different random numbers on each rank from then on, and
        gradients of whole weights there are summed over the ranks.

        Args:
            planned: The layers that the plan splits.

        Raises:
            ValueError: The model does not run, or computes different results.
        """
        try:
            after = self._run()
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise ValueError(f"The split model does not run. {_ADVICE} Raised: {error}") from error
        sliced = self._sliced(after)
        problem = self._outputs_differ(after.outputs) or self._gradients_differ(after.gradients)
        if problem:
            ids = {id(layer) for layer in planned}
            others = [x for x in sliced if id(x) not in ids and not sublayers(x)]
            paths = [layer.path or layer.name for layer in others[:8]]
            seen = f" Other layers that got a slice: {', '.join(paths)}." if paths else ""
            raise ValueError(
                f"The split model does not compute the same as before: {problem}. {_ADVICE}{seen}"
            )
        self._draw_apart(sliced)

    def _run(self) -> _Run:
        values = [weight.value for weight in self._weights]
        every = [self._model, *self._layers]
        with _precisely(every), _plain_errors(), _recorded(self._layers) as shapes:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                outputs = keras.tree.flatten(self._model(self._sample))
                self._num_outputs = len(outputs)
                losses = [loss for layer in all_layers(self._model) for loss in own_losses(layer)()]
                outputs += map(tf.convert_to_tensor, losses)
                objective = tf.add_n([_objective(n, out) for n, out in enumerate(outputs)])
            gradients = tape.gradient(objective, values)
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return _Run(outputs, gradients, shapes)

    def _sliced(self, after: _Run) -> list[keras.layers.Layer]:
        """The layers whose input shapes differ in each of their calls."""
        found = []
        for layer in self._layers:
            calls = self._before.shapes.get(id(layer), []), after.shapes.get(id(layer), [])
            changed = [one != other for one, other in zip(*calls, strict=False)]
            if changed and all(changed) and len(calls[0]) == len(calls[1]):
                found.append(layer)
        return found

    def _outputs_differ(self, outputs) -> str | None:
        pairs = list(zip(outputs, self._before.outputs, strict=True))
        for number, (found, expected) in enumerate(pairs):
            if found.shape != expected.shape:
                shapes = f"{tuple(expected.shape)}, and has {tuple(found.shape)}"
                return f"{self._named(number)} had the shape {shapes}"
        off = self._highest([_difference(*pair, 0.0, below=_STANDS_FOR_INFINITY) for pair in pairs])
        worst = int(np.argmax(off))
        if off[worst] > _CLOSE:
            return f"{self._named(worst)} differs by {off[worst]:.2g} of its size"
        return None

    def _named(self, number: int) -> str:
        return f"output {number}" if number < self._num_outputs else "a loss that a layer adds"

    def _gradients_differ(self, gradients) -> str | None:
        """Compares the gradients; marks weights of which each rank computes a part."""
        before = self._before.gradients
        norms = [float(tf.norm(tf.cast(g, tf.float32))) for g in before if g is not None]
        least = _NEGLIGIBLE * max(norms, default=0.0)

        def off(found) -> np.ndarray:
            pairs = zip(self._weights, found, before, strict=True)
            return self._highest([_off(w, one, other, least) for w, one, other in pairs])

        parts = [
            place
            for place, size in enumerate(off(gradients))
            if (size > self._close and layout_of(self._weights[place]).slice is None)
            # Weights that an adapter marks as partial are summed in any case.
            or (before[place] is not None and self._is_partial(self._weights[place]))
        ]
        for place in parts:
            found = gradients[place]
            if found is None:
                found = tf.zeros_like(self._weights[place].value)
            gradients[place] = all_reduce(found, self._group, name="parallelize/gradient")
        wrong = [place for place, size in enumerate(off(gradients)) if size > self._close]
        if wrong:
            paths = ", ".join(f"`{self._weights[place].path}`" for place in wrong[:5])
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            return f"gradients differ, those of {paths}{more}"
        for place in parts:
            sum_gradient_over(self._weights[place], self._group)
        return None

    def _is_partial(self, weight) -> bool:
        return layout_of(weight).partial_over is self._group

    def _highest(self, values: list[float]) -> np.ndarray:
        """The ranks' maxima, so that all ranks come to the same result."""
        here = tf.constant([0.0, *values], tf.float32)
        return all_reduce(here, self._group, "max", name="parallelize/differences").numpy()[1:]

    def _draw_apart(self, sliced) -> None:
        """Makes ranks with different units drop different ones."""
        own = {id(layer) for layer in sliced}
        generators: dict[int, tuple[Any, list[bool]]] = {}
        for layer in self._layers:
            for value in vars(layer).values():
                if isinstance(value, keras.random.SeedGenerator):
                    _, where = generators.setdefault(id(value), (value, []))
                    where.append(id(layer) in own)
        for generator, where in generators.values():
            # A generator that is also used for a whole activation must draw the same on all ranks.
            if all(where):
                override(generator, "next", per_rank_random(generator.next, self._group))


@contextlib.contextmanager
def _recorded(layers) -> Iterator[dict[int, list]]:
    """Records the input shapes of each call of the layers."""
    shapes: dict[int, list] = {}

    def recording(layer, stock):
        def call(*args, **kwargs):
            tensors = [x for x in keras.tree.flatten((args, kwargs)) if tf.is_tensor(x)]
            shapes.setdefault(id(layer), []).append([tuple(x.shape) for x in tensors])
            return stock(*args, **kwargs)

        return call

    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer in layers:
            override(layer, "call", recording(layer, layer.call))
        yield shapes
    finally:
        for layer, call in before:
            if call is None:
                vars(layer).pop("call", None)
            else:
                override(layer, "call", call)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises errors without the call's arguments that Keras adds."""
    filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtering:
            keras.config.enable_traceback_filtering()


class _Float32(keras.DTypePolicy):
    """A policy that computes in float32, with weights of another dtype, which are cast where they are used."""

    variable_dtype = ""
    quantization_mode: str | None = None

    def __init__(self, layer: keras.layers.Layer):
        super().__init__("float32")
        self.variable_dtype = layer.variable_dtype
        self.quantization_mode = layer.quantization_mode


@contextlib.contextmanager
def _precisely(layers) -> Iterator[None]:
    """Computes layers of floats in float32: less would hide small differences."""
    before = [(layer, layer.dtype_policy) for layer in layers]
    tensor_float = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        for layer in layers:
            if layer.variable_dtype != "float64":
                override(layer, dtype_policy.name, _Float32(layer))
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(tensor_float)
        for layer, policy in before:
            override(layer, dtype_policy.name, policy)


def _objective(number: int, output) -> tf.Tensor:
    """A scalar to which each entry of an output contributes with a different factor."""
    if not output.dtype.is_floating:
        return tf.zeros([])
    rates = tf.random.stateless_normal(tf.shape(output), seed=[number, 7])
    return tf.reduce_sum(rates * tf.cast(output, tf.float32))


def _off(weight, found, expected, least: float) -> float:
    if found is None and expected is None:
        return 0.0
    if expected is None:
        return math.inf
    sharding = layout_of(weight).slice
    if sharding is not None:
        expected = sharding.slice_of(expected)
    if found is None:
        found = tf.zeros_like(expected)
    return _difference(found, expected, least)


def _difference(found, expected, least: float, below: float = math.inf) -> float:
    """The norm of the difference, relative to what is expected, or to `least` if that is larger.

    Entries of `below` or more do not count, nor those that are NaN in both.
    """
    if not expected.dtype.is_floating:
        return float(tf.reduce_any(found != expected))
    found, expected = tf.cast(found, tf.float32), tf.cast(expected, tf.float32)
    alike = (found == expected) | (tf.math.is_nan(found) & tf.math.is_nan(expected))
    counts = tf.math.is_finite(expected) & (tf.abs(expected) < below)
    off = float(tf.norm(tf.where(alike | ~counts, 0.0, found - expected)))
    part = off / (max(float(tf.norm(tf.where(counts, expected, 0.0))), least) or 1.0)
    return part if math.isfinite(part) else math.inf


def _made_up_sample(model: keras.Model):
    """Random numbers of the input shapes of a functional model, the same on all ranks."""
    inputs: Any = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError(
            "Comparing the split model requires a sample, except for functional models. Received: "
            f"`{model.name}` of type {type(model).__name__}, sample=None. Pass one: "
            "parallelize(..., sample=...)."
        )
    random = np.random.default_rng(0)
    tables = [x.input_dim for x in all_layers(model) if isinstance(x, keras.layers.Embedding)]

    def make(spec):
        shape = [_OPEN if size is None else size for size in spec.shape]
        if spec.shape and spec.shape[0] is None:
            shape[0] = _BATCH
        dtype = tf.as_dtype(spec.dtype)
        if dtype.is_floating:
            return tf.constant(random.normal(size=shape), dtype)
        if dtype.is_bool:
            return tf.ones(shape, dtype)
        if dtype.is_integer:
            return tf.constant(random.integers(0, min(tables, default=2), shape), dtype)
        raise ValueError(
            f"A sample of dtype {dtype.name} cannot be generated. Received: the input `{spec.name}`. "
            "Pass a sample: parallelize(..., sample=...)."
        )

    # A Sequential is called with one tensor, without a structure.
    taken = inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(make, taken)
