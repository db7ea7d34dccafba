"""A model as a chain: links, with the tensors that lead from each to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.calls import Call, calls_of, flat_inputs, model_of
from tfdist.backend.keras.functional import deferred_weights
from tfdist.backend.keras.private import all_layers, get_keras_mask
from tfdist.pipeline.cuts import Step, order, places
from tfdist.pipeline.link import Link
from tfdist.pipeline.probabilities import activation_of, logits_of
from tfdist.pipeline.shapes import RowShape, rows_of_inputs
from tfdist.utils import checks


class Chain:
    """The links of a functional model, in order.

    A functional model can be cut wherever just one tensor leads from what ran before to what runs
    after: between the layers of a plain stack, and around each block with a shortcut. Besides it
    there may be tensors that blocks share, as an encoder's output: `tfdist.pipeline.cuts` says which.
    The model's own inputs do not count, since all ranks have them, nor do outputs that wait for the
    end. Models that the model calls are looked into, as the backbone of a task is. There is no cut at
    a tensor with a Keras mask, as that of an `Embedding(mask_zero=True)`.

    Args:
        model: A Sequential or functional model; or a list that begins with a `keras.Input`, of layers
            that are called one after the other.
        input_shape: The shape of one row of its inputs, where the model leaves some of it open: for
            several inputs one shape that all with open sizes have, a dict by their names, or a list.

    Attributes:
        model: The model.
        links: The links.
        inputs: The numbers of the model's inputs.
        outputs: Those of its outputs.
        executed: The layers in the order in which the model itself calls them.
        activations: By number of an output the softmax or sigmoid that it is, if it is one.

    Raises:
        ValueError: The model is no such model.
    """

    def __init__(
        self,
        model: keras.Model | Sequence,
        input_shape: Sequence | Mapping | None = None,
    ):
        if not isinstance(model, keras.Model):
            model = _stack(model)
        calls, outputs = calls_of(model)
        self.model = model
        self._rows = rows_of_inputs(model.inputs, input_shape)
        numbers: dict[int, int] = {}
        for tensor in [*model.inputs, *(made for call in calls for made in call.makes)]:
            numbers.setdefault(id(tensor), len(numbers))
        self._calls, self._numbers = calls, numbers
        self.inputs = tuple(numbers[id(tensor)] for tensor in model.inputs)
        self.outputs = tuple(numbers[id(tensor)] for tensor in outputs)
        self.activations = {
            self._number(tensor): activation
            for call in calls
            if (activation := activation_of(call)) is not None
            for tensor in call.makes
            if self._number(tensor) in self.outputs
        }
        self.executed = [c.operation for c in calls if isinstance(c.operation, keras.Layer)]
        self.links = self._make_links()
        self._flops: dict[int, list[int]] = {}
        self._shapes: dict[tuple, dict[int, RowShape]] = {}

    def __len__(self) -> int:
        return len(self.links)

    def flat_inputs(self, x) -> dict[int, tf.Tensor]:
        """The inputs of the model by number, cast to its dtypes.

        Args:
            x: Tensors in the form in which the model takes them: one, a dict, a list or a tuple.

        Raises:
            ValueError: They are not the inputs of this model.
        """
        return dict(zip(self.inputs, flat_inputs(self.model, x), strict=True))

    def as_outputs(self, tensors: Sequence):
        """The outputs in the form in which the model returns them: one, a dict, a list or a tuple."""
        if isinstance(self.model, keras.Sequential):
            return tensors[0]
        packed = keras.tree.pack_sequence_as(self.model.output, list(tensors))
        # Keras returns a list of one tensor as the tensor.
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed

    def packed(
        self, tensors: Mapping[int, tf.Tensor], specs: Mapping[int, tf.TensorSpec]
    ) -> dict[int, tf.Tensor]:
        """What goes from a stage to the next in the place of some tensors, by number.

        Args:
            tensors: The tensors.
            specs: What the next stage takes those to be like that it gets.

        Raises:
            ValueError: One has another shape, since its layer says that it would have that.
        """
        found = {}
        for number, spec in specs.items():
            tensor = tensors[number]
            next(link for link in self.links if number in link.makes).check_shape(
                tensor, spec.shape
            )
            if number in self.activations:
                tensor = logits_of(tensor, self.activations[number])
            found[number] = tf.cast(tensor, spec.dtype)
        return found

    def unpacked(self, tensors: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """The tensors in whose place others have arrived, by number."""
        return {
            number: self.activations[number](tensor) if number in self.activations else tensor
            for number, tensor in tensors.items()
        }

    def before(self, place: int) -> tuple[int, ...]:
        """The tensors that lead to a link from those before it, but the inputs of the model."""
        return self.links[place - 1].after if place else ()

    def made_and_read(self, number: int) -> tuple[Any, int]:
        """The layer or operation that makes a tensor, and how many calls read it."""
        maker = next(
            call.operation for call in self._calls if number in map(self._number, call.makes)
        )
        return maker, sum(number in map(self._number, call.reads) for call in self._calls)

    def specs(
        self, rows: int | None = None, inputs: Sequence[tf.TensorSpec] | None = None
    ) -> dict[int, tf.TensorSpec]:
        """What the inputs are like, and the tensors that lead from link to link, by number.

        Args:
            rows: How many rows.
            inputs: What a row of each input is like, in place of what the chain knows of it.
        """
        shapes = self._rows if inputs is None else [tuple(spec.shape) for spec in inputs]
        tensors = {
            number: keras.KerasTensor((rows, *shape), own.dtype)
            for number, shape, own in zip(self.inputs, shapes, self.model.inputs, strict=True)
        }
        for link in self.links:
            made = link.model.compute_output_spec(link.arguments(tensors))
            tensors |= zip(link.makes, keras.tree.flatten(made), strict=True)
        return {n: tf.TensorSpec(tensor.shape, tensor.dtype) for n, tensor in tensors.items()}

    def row_shapes(self, inputs: Sequence[tf.Tensor]) -> dict[int, RowShape]:
        """The shapes of the tensors that lead from link to link, by number, for any number of rows.

        Args:
            inputs: A batch's inputs in the order of the model's.
        """
        key = tuple(tuple(tensor.shape[1:]) for tensor in inputs)
        if key not in self._shapes:
            rows = [tf.TensorSpec(tensor.shape[1:], tensor.dtype) for tensor in inputs]
            two, three = self.specs(2, rows), self.specs(3, rows)
            self._shapes[key] = {n: RowShape.of(spec, three[n]) for n, spec in two.items()}
        return self._shapes[key]

    def with_gradient(self) -> set[int]:
        """The tensors that have a gradient: floating-point ones that trained weights lead to."""
        found: set[int] = set()
        for call in self._calls:
            if any(self._number(tensor) in found for tensor in call.reads) or _is_trained(call):
                found |= {self._number(t) for t in call.makes if tf.as_dtype(t.dtype).is_floating}
        return found

    @functools.cached_property
    def has_known_shapes(self) -> bool:
        """Whether only the number of rows of the tensors between the links is open."""
        return all(None not in row for row in self._rows) and not any(
            None in spec.shape[1:] for spec in self.specs().values()
        )

    def flops(self, rows: int = 1) -> list[int]:
        """The floating-point operations of each link's forward pass.

        Args:
            rows: For how many rows.

        Raises:
            ValueError: A link's input has a dim of unknown size.
        """
        if rows not in self._flops:
            self.check_known_shapes("FLOPs can be counted")
            specs = self.specs(rows)
            self._flops[rows] = [link.flops(specs) for link in self.links]
        return self._flops[rows]

    def check_known_shapes(self, what: str) -> None:
        """Raises where more than the number of rows is open.

        Args:
            what: What cannot be done then.

        Raises:
            ValueError: It is.
        """
        if self.has_known_shapes:
            return
        specs = self.specs()
        name, spec = next(
            (link.name, spec)
            for link in self.links
            for spec in [*link.arguments(specs), *(specs[number] for number in link.makes)]
            if None in spec.shape[1:]
        )
        raise ValueError(
            f"The input of `{name}` has the shape {tuple(spec.shape)}: {what} where only the "
            "number of rows is open. Give `input_shape` or the model's Input all other sizes, or "
            "share out the layers by cost='parameters'."
        )

    def _number(self, tensor: keras.KerasTensor) -> int:
        return self._numbers[id(tensor)]

    def _make_links(self) -> list[Link]:
        """Cuts the calls, put into an order of few tensors at a time, wherever there is a cut."""
        steps = [
            Step(
                tuple(n for n in map(self._number, call.reads) if n not in self.inputs),
                tuple(map(self._number, call.makes)),
            )
            for call in self._calls
        ]
        sequence = order(steps, self.outputs)
        masked = {
            self._number(tensor)
            for call in self._calls
            for tensor in call.makes
            if get_keras_mask(tensor) is not None
        }
        found = places([steps[place] for place in sequence], set(self.outputs), masked)
        links: list[Link] = []
        waiting: list[Call] = []
        why = ""
        for place, lies in zip(sequence, found, strict=True):
            waiting.append(self._calls[place])
            if lies.is_cut:
                links.append(self._link(waiting, lies.live, why))
                waiting, why = [], ""
            elif not why:
                why = self._why_whole(lies.live, masked)
        if links:
            # Layers of models inside that lead to no output: they are saved and loaded with the rest.
            idle = _idle_layers(self.model, links)
            links[-1] = dataclasses.replace(links[-1], layers=(*links[-1].layers, *idle))
        return links

    def _why_whole(self, live: tuple[int, ...], masked: set[int]) -> str:
        """Why there is no cut where these tensors lead on."""
        makers = {self._number(t): c.operation.name for c in self._calls for t in c.makes}
        for number in live:
            if number in masked:
                return f"what `{makers[number]}` makes has a Keras mask"
        names = list(dict.fromkeys(f"`{makers[number]}`" for number in live))
        return f"what {' and '.join(names)} make leads on side by side"

    def _link(self, calls: list[Call], live: tuple[int, ...], why: str) -> Link:
        made = {self._number(tensor): tensor for call in calls for tensor in call.makes}
        read = {self._number(tensor): tensor for call in calls for tensor in call.reads}
        read = {number: tensor for number, tensor in read.items() if number not in made}
        ends = {number: made[number] for number in live if number in made}
        with deferred_weights():
            model = model_of(calls, list(read.values()), list(ends.values()))
        layers = [call.operation for call in calls if isinstance(call.operation, keras.Layer)]
        if len(calls) == 1 and isinstance(calls[0].operation, keras.Model):
            why = "it is a model that does more than its graph says"
        return Link(
            " + ".join(dict.fromkeys(call.operation.name for call in calls)),
            model,
            tuple(dict.fromkeys(layers)),
            tuple(read),
            tuple(number for number in read if number in self.inputs),
            tuple(ends),
            live,
            why,
        )


def _stack(layers: Sequence) -> keras.Model:
    layers = list(checks.sequence("model", layers, "layers, or a Keras model"))
    if not layers or not isinstance(layers[0], keras.KerasTensor | keras.layers.InputLayer):
        found = type(layers[0]).__name__ if layers else "an empty list"
        raise ValueError(
            "A `model` that is a list of layers begins with the `keras.Input` that the first of "
            f"them gets. Received: {checks.shown(layers)}, with {found} first."
        )
    first = layers[0]
    tensor = inputs = first if isinstance(first, keras.KerasTensor) else first.output
    with deferred_weights():
        for layer in layers[1:]:
            tensor = layer(tensor)
        return keras.Model(inputs, tensor)


def _idle_layers(model: keras.Model, links: list[Link]) -> list[keras.layers.Layer]:
    """The layers with weights that no link has, the outermost of each."""
    held = {id(variable) for link in links for variable in link.variables}
    idle: list[keras.layers.Layer] = []
    for layer in all_layers(model, include_self=False):
        variables = {id(variable) for variable in layer.variables}
        if variables and not variables & held:
            idle.append(layer)
            held |= variables
    return idle


def _is_trained(call: Call) -> bool:
    """Whether a model trains weights of this call: Keras asks the weights, not the layers inside."""
    layer = call.operation
    return isinstance(layer, keras.Layer) and any(v.trainable for v in layer.variables)
