"""A model as a chain: segments, and the tensors between them."""

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
from tfdist.pipeline.probabilities import activation_of, logits_of
from tfdist.pipeline.segment import Segment
from tfdist.pipeline.shapes import RowShape, rows_of_inputs
from tfdist.utils import checks


class Chain:
    """The segments of a functional model, in order.

    A functional model can be split wherever a single tensor connects the layers before with the layers
    after: between the layers of a plain stack, and around each block with a shortcut. In addition, blocks
    may share tensors such as an encoder's output: see `tfdist.pipeline.cuts`. The model's own inputs do
    not count, since all ranks have them, nor do outputs that no later layer reads. Models that the model
    calls are split as well, such as the backbone of a task. A model is not split at a tensor with a Keras
    mask, such as that of an `Embedding(mask_zero=True)`.

    Args:
        model: A Sequential or functional model; or a list of layers that are called one after the other,
            with a `keras.Input` first.
        input_shape: The shape of one row of its inputs, if the model does not define it completely. For
            several inputs: one shape for all inputs with undefined sizes, a dict by their names, or a list.

    Attributes:
        model: The model.
        segments: The segments.
        inputs: The numbers of the model's inputs.
        outputs: The numbers of its outputs.
        executed: The layers in the order in which the model calls them.
        activations: The softmax or sigmoid that an output is the result of, by the output's number.

    Raises:
        ValueError: The model is not supported.
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
        self._calls = calls
        made = [tensor for call in calls for tensor in call.makes]
        #: By number. The order of first occurrence numbers the tensors.
        self._tensors = list({id(tensor): tensor for tensor in [*model.inputs, *made]}.values())
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        self.inputs, self.outputs = self._of(model.inputs), self._of(outputs)
        self._steps = [
            Step(
                tuple(number for number in self._of(call.reads) if number not in self.inputs),
                self._of(call.makes),
            )
            for call in calls
        ]
        self._makers = {number: call for call in calls for number in self._of(call.makes)}
        self.activations = {
            number: activation
            for number, call in self._makers.items()
            if number in self.outputs and (activation := activation_of(call)) is not None
        }
        self.executed = [c.operation for c in calls if isinstance(c.operation, keras.Layer)]
        self.segments = self._make_segments()
        self._flops: dict[int, list[int]] = {}
        self._shapes: dict[tuple, dict[int, RowShape]] = {}

    def __len__(self) -> int:
        return len(self.segments)

    def _of(self, tensors: Sequence[keras.KerasTensor]) -> tuple[int, ...]:
        """The numbers of tensors."""
        return tuple(self._numbers[id(tensor)] for tensor in tensors)

    def flat_inputs(self, x) -> dict[int, tf.Tensor]:
        """The inputs of the model by number, cast to its dtypes.

        Args:
            x: Tensors in the structure of the model's inputs: one, a dict, a list or a tuple.

        Raises:
            ValueError: They are not the inputs of this model.
        """
        return dict(zip(self.inputs, flat_inputs(self.model, x), strict=True))

    def as_outputs(self, tensors: Sequence):
        """The outputs in the structure that the model returns: one, a dict, a list or a tuple."""
        if isinstance(self.model, keras.Sequential):
            return tensors[0]
        packed = keras.tree.pack_sequence_as(self.model.output, list(tensors))
        # Keras returns a list of one tensor as the tensor.
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed

    def packed(
        self, tensors: Mapping[int, tf.Tensor], specs: Mapping[int, tf.TensorSpec]
    ) -> dict[int, tf.Tensor]:
        """Tensors as they are sent from a stage to the next, by number.

        Args:
            tensors: The tensors.
            specs: The specifications of those that the next stage reads.

        Raises:
            ValueError: A tensor has a shape other than its layer has declared.
        """
        found = {}
        for number, spec in specs.items():
            tensor = tensors[number]
            maker = next(segment for segment in self.segments if number in segment.makes)
            maker.check_shape(tensor, spec.shape)
            if number in self.activations:
                tensor = logits_of(tensor, self.activations[number])
            found[number] = tf.cast(tensor, spec.dtype)
        return found

    def unpacked(self, tensors: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """The tensors that `packed` was called with, from its result."""
        return {
            number: self.activations[number](tensor) if number in self.activations else tensor
            for number, tensor in tensors.items()
        }

    def before(self, place: int) -> tuple[int, ...]:
        """The tensors that a segment and later ones read from earlier ones, without the inputs."""
        return self.segments[place - 1].after if place else ()

    def described(self, number: int) -> str:
        """A tensor in the words of messages."""
        if number in self.inputs:
            return f"the input `{self._tensors[number].name}`"
        return f"the output of `{self._makers[number].operation.name}`"

    def made_and_read(self, number: int) -> tuple[Any, int]:
        """The layer or operation that makes a tensor, and the number of calls that read it."""
        return self._makers[number].operation, sum(number in step.reads for step in self._steps)

    def specs(
        self, rows: int | None = None, inputs: Sequence[tf.TensorSpec] | None = None
    ) -> dict[int, tf.TensorSpec]:
        """The specifications of the inputs and of the tensors between segments, by number.

        Args:
            rows: The number of rows.
            inputs: The specification of a row of each input; by default those of the model.
        """
        shapes = self._rows if inputs is None else [tuple(spec.shape) for spec in inputs]
        tensors = {
            number: keras.KerasTensor((rows, *shape), own.dtype)
            for number, shape, own in zip(self.inputs, shapes, self.model.inputs, strict=True)
        }
        for segment in self.segments:
            made = segment.model.compute_output_spec(segment.arguments(tensors))
            tensors |= zip(segment.makes, keras.tree.flatten(made), strict=True)
        return {n: tf.TensorSpec(tensor.shape, tensor.dtype) for n, tensor in tensors.items()}

    def row_shapes(self, inputs: Sequence[tf.Tensor]) -> dict[int, RowShape]:
        """The shapes of the tensors between segments as functions of the number of rows, by number.

        Args:
            inputs: The inputs of a batch, in the model's order.
        """
        key = tuple(tuple(tensor.shape[1:]) for tensor in inputs)
        if key not in self._shapes:
            rows = [tf.TensorSpec(tensor.shape[1:], tensor.dtype) for tensor in inputs]
            two, three = self.specs(2, rows), self.specs(3, rows)
            self._shapes[key] = {n: RowShape.of(spec, three[n]) for n, spec in two.items()}
        return self._shapes[key]

    def with_gradient(self) -> set[int]:
        """The tensors with a gradient: floating-point ones that depend on trained weights."""
        found: set[int] = set()
        for call, step in zip(self._calls, self._steps, strict=True):
            # The call of a model trains by its weights, not by the flags of the layers inside.
            layer = call.operation
            is_trained = isinstance(layer, keras.Layer) and any(
                v.trainable for v in layer.variables
            )
            if is_trained or not found.isdisjoint(step.reads):
                dtypes = {number: tf.as_dtype(self._tensors[number].dtype) for number in step.makes}
                found |= {number for number, dtype in dtypes.items() if dtype.is_floating}
        return found

    @functools.cached_property
    def has_known_shapes(self) -> bool:
        """Whether only the number of rows of the tensors between segments is undefined."""
        return all(None not in row for row in self._rows) and not any(
            None in spec.shape[1:] for spec in self.specs().values()
        )

    def flops(self, rows: int = 1) -> list[int]:
        """The floating-point operations of each segment's forward pass.

        Args:
            rows: The number of rows.

        Raises:
            ValueError: An input of a segment has a dim of unknown size.
        """
        if rows not in self._flops:
            self.check_known_shapes("the number of FLOPs")
            specs = self.specs(rows)
            self._flops[rows] = [segment.flops(specs) for segment in self.segments]
        return self._flops[rows]

    def check_known_shapes(self, what: str) -> None:
        """Raises ValueError if more than the number of rows is undefined.

        Args:
            what: The subject that requires the shapes, for the message.
        """
        if self.has_known_shapes:
            return
        specs = self.specs()
        number = next(number for number, spec in specs.items() if None in spec.shape[1:])
        raise ValueError(
            f"Only the number of rows may be undefined, since {what} requires all other sizes. "
            f"Received: {self.described(number)} of shape {tuple(specs[number].shape)}. Define all other "
            "sizes in `input_shape` or the model's Input, or use cost='parameters'."
        )

    def _make_segments(self) -> list[Segment]:
        """Splits the calls wherever possible, in an order with few tensors at a time."""
        sequence = order(self._steps, self.outputs)
        masked = {n for n in self._makers if get_keras_mask(self._tensors[n]) is not None}
        found = places([self._steps[place] for place in sequence], set(self.outputs), masked)
        segments: list[Segment] = []
        waiting: list[Call] = []
        why = ""
        for place, between in zip(sequence, found, strict=True):
            waiting.append(self._calls[place])
            if between.is_cut:
                segments.append(self._segment(waiting, between.live, why))
                waiting, why = [], ""
            elif not why:
                why = self._why_whole(between.live, masked)
        if segments:
            # Layers inside models that no output depends on are saved and loaded with the others.
            idle = _idle_layers(self.model, segments)
            last = segments[-1]
            segments[-1] = dataclasses.replace(last, layers=(*last.layers, *idle))
        return segments

    def _why_whole(self, live: tuple[int, ...], masked: set[int]) -> str:
        """Why the chain cannot be split where these tensors are read later."""
        for number in live:
            if number in masked:
                return f"{self.described(number)} has a Keras mask"
        return f"{' and '.join(dict.fromkeys(map(self.described, live)))} are used in parallel"

    def _segment(self, calls: list[Call], live: tuple[int, ...], why: str) -> Segment:
        made = {number for call in calls for number in self._of(call.makes)}
        read = [n for call in calls for n in self._of(call.reads) if n not in made]
        reads = tuple(dict.fromkeys(read))
        ends = tuple(number for number in live if number in made)
        with deferred_weights():
            begin, end = ([self._tensors[number] for number in some] for some in (reads, ends))
            model = model_of(calls, begin, end)
        operations = [call.operation for call in calls]
        if len(calls) == 1 and isinstance(operations[0], keras.Model):
            why = "it is a model with a custom `call`"
        return Segment(
            " + ".join(dict.fromkeys(operation.name for operation in operations)),
            model,
            tuple(dict.fromkeys(each for each in operations if isinstance(each, keras.Layer))),
            reads,
            tuple(number for number in reads if number in self.inputs),
            ends,
            live,
            why,
        )


def _stack(layers: Sequence) -> keras.Model:
    layers = list(checks.sequence("model", layers, "layers, or a Keras model"))
    if not layers or not isinstance(layers[0], keras.KerasTensor | keras.layers.InputLayer):
        found = type(layers[0]).__name__ if layers else "an empty list"
        raise ValueError(
            "A `model` that is a list of layers must begin with the `keras.Input` of the first layer. "
            f"Received: {checks.shown(layers)}, with {found} first."
        )
    first = layers[0]
    tensor = inputs = first if isinstance(first, keras.KerasTensor) else first.output
    with deferred_weights():
        for layer in layers[1:]:
            tensor = layer(tensor)
        return keras.Model(inputs, tensor)


def _idle_layers(model: keras.Model, segments: list[Segment]) -> list[keras.layers.Layer]:
    """The outermost layers with weights that are in no segment."""
    held = {id(variable) for segment in segments for variable in segment.variables}
    idle: list[keras.layers.Layer] = []
    for layer in all_layers(model, include_self=False):
        variables = {id(variable) for variable in layer.variables}
        if variables and held.isdisjoint(variables):
            idle.append(layer)
            held |= variables
    return idle
