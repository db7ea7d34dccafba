"""The state of compressed gradients, and their reduction."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.meter import Meter, MeteredStep
from tfdist.addons.slow_links.momentum import CompressedMomentum
from tfdist.collectives import Group
from tfdist.gradients.buckets import buckets
from tfdist.gradients.reduce import reduce_gradients
from tfdist.sharding.updates import unwrapped
from tfdist.step.gradient_options import GradientOptions

if TYPE_CHECKING:
    from tfdist.addons.slow_links.compressor import Compressor

RESIDUAL = "residual"


class CompressionState:
    """The state of the compression of one optimizer's gradients on this rank.

    Args:
        compressor: The compressor.

    Attributes:
        step: The number of steps so far, an int64 scalar.
        slots: By the id of a variable, the residual of its gradient and the compressor's state.
        meter: The measurements of the steps so far.
    """

    def __init__(self, compressor: Compressor):
        self.compressor = compressor
        with tf.init_scope():
            self.step = keras.Variable(0, dtype="int64", trainable=False, name="compression_step")
            self.meter = Meter()
        self.slots: dict[int, dict[str, keras.Variable]] = {}

    def slots_of(self, variable, group: Group) -> dict[str, keras.Variable]:
        """The residual and the compressor's own variables, which are created if needed."""
        found = self.slots.get(id(variable))
        if found is None:
            with tf.init_scope():
                found = self.slots[id(variable)] = {
                    name: keras.Variable(value, dtype=value.dtype.name, trainable=False, name=name)
                    for name, value in self.initial(variable, group).items()
                }
        return found

    def end_step(self) -> None:
        """Counts a step."""
        self.step.assign_add(1)

    def initial(self, variable, group: Group) -> dict[str, np.ndarray]:
        """The initial values of the variables for a gradient."""
        shape = tuple(variable.shape)
        own = self.compressor.initial_state(shape, group.size)
        return {RESIDUAL: np.zeros(shape, "float32"), **own}


_states: weakref.WeakKeyDictionary[Any, CompressionState] = weakref.WeakKeyDictionary()


def compression_state(optimizer, compressor: Compressor) -> CompressionState:
    """The state of an optimizer's compression, which is created if needed."""
    if optimizer not in _states:
        _states[optimizer] = CompressionState(compressor)
    return _states[optimizer]


def state_of(model: keras.Model, compressor: Compressor) -> CompressionState | None:
    """The state of a compiled model's compression; None if it has no optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else compression_state(unwrapped(optimizer), compressor)


def reduce_compressed(
    gradients: Sequence[tf.Tensor],
    variables: Sequence,
    state: CompressionState,
    group: Group,
    reduction: str,
    options: GradientOptions,
    *,
    momentum: CompressedMomentum | None = None,
    begins: bool = True,
) -> list[tf.Tensor]:
    """Reduces gradients over a group; after the first steps they are compressed.

    Args:
        gradients: Dense tensors, in the order of the variables.
        variables: Their variables.
        state: The state of the compression.
        group: The ranks.
        reduction: "sum" or "mean".
        options: The options of gradient communication.
        momentum: The optimizer, if its momentum is compressed in place of gradients.
        begins: Whether these are the first gradients of their step.
    """
    compressor = state.compressor
    slots = [state.slots_of(variable, group) for variable in variables]

    def whole() -> list[tf.Tensor]:
        with state.meter.step(gradients, group.size, is_compressed=False, begins=begins) as metered:
            reduced = reduce_gradients(gradients, group, reduction, options)
            metered.end(reduced)
        return reduced

    def compressed() -> list[tf.Tensor]:
        with state.meter.step(gradients, group.size, is_compressed=True, begins=begins) as metered:
            sent = gradients
            if momentum is not None:
                # The momentum is that of the ranks' mean gradient, also if gradients are summed.
                share = group.size if reduction == "sum" else 1
                pairs = zip(gradients, variables, strict=True)
                sent = [
                    momentum.to_send(gradient * share, variable) for gradient, variable in pairs
                ]
            reduced = _in_buckets(sent, slots, state, metered, group, options)
            if momentum is not None:
                pairs = zip(reduced, variables, strict=True)
                reduced = [momentum.received(mean, variable) for mean, variable in pairs]
            elif reduction == "sum":
                reduced = [gradient * group.size for gradient in reduced]
            metered.end(reduced)
        return reduced

    if not compressor.start_step:
        return compressed()
    is_whole = tf.convert_to_tensor(state.step) < compressor.start_step
    return tf.cond(is_whole, whole, compressed)


def _in_buckets(
    gradients, slots, state: CompressionState, metered: MeteredStep, group: Group, options
) -> list:
    """The means, in buckets that begin with the last layers: the backward pass yields theirs first."""
    found: list = list(gradients)
    order = [(place, gradients[place]) for place in reversed(range(len(gradients)))]
    for number, bucket in enumerate(buckets(order, options.bucket_bytes)):
        some = [slots[place] for place in bucket]
        waiting = [
            tf.convert_to_tensor(slot[RESIDUAL])
            + state.compressor.prepare(tf.cast(gradients[place], tf.float32), slot, group.size)
            for place, slot in zip(bucket, some, strict=True)
        ]
        step = tf.convert_to_tensor(state.step)
        with metered.bucket([gradients[place] for place in bucket]) as ended:
            means, sent = state.compressor.exchange(
                waiting, some, step, group, f"gradients/compressed{number}"
            )
            ended(means)
        for place, slot, own, mean, part in zip(bucket, some, waiting, means, sent, strict=True):
            slot[RESIDUAL].assign(own - part)
            found[place] = tf.cast(
                tf.ensure_shape(mean, gradients[place].shape), gradients[place].dtype
            )
    return found
