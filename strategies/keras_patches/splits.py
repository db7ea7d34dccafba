"""Variables that a rank holds a part of or not at all, where Keras looks at them as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, broadcast
from tfdist.sharding.layout import VariableLayout, global_shape, layout_of, whole_value
from tfdist.sharding.parts import deep_copy
from tfdist.watchdog.hints import SAVED


def split_variables(model: keras.Model) -> list[tuple[keras.Variable, VariableLayout]]:
    """The split variables of a model and its optimizer, in an order that is the same on all ranks."""
    variables = list(getattr(model, "variables", ()))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    found: dict[int, tuple] = {}
    for variable in variables:
        layout = layout_of(variable)
        if any(part is not None for part in (layout.flat, layout.slice, layout.stage)):
            found[id(variable)] = (variable, layout)
    return list(found.values())


def whole_values(
    variables: Sequence[tuple[keras.Variable, VariableLayout]], *, keep: bool
) -> dict[int, np.ndarray]:
    """The global arrays of split variables, by the variable's id; every rank calls this.

    Args:
        variables: The split variables.
        keep: Whether this rank wants them. One that does not holds one array at a time.
    """
    found = {}
    for variable, _ in variables:
        whole = whole_value(variable, SAVED).numpy()
        if keep:
            found[id(variable)] = whole
    return found


def receive_slices(model: keras.Model, group: Group) -> None:
    """What a rank does while the chief alone reads a file: gets its slices of what is read."""
    for variable, layout in split_variables(model):
        zeros = tf.zeros(global_shape(variable), variable.dtype)
        whole = broadcast(zeros, group, name="restored")
        variable._value.assign(deep_copy(layout.shard_of_global(whole.numpy())))


@contextlib.contextmanager
def standing_in(
    variables: Sequence[tuple[keras.Variable, VariableLayout]],
    wholes: dict[int, np.ndarray] | None,
    others: Group | None = None,
) -> Iterator[None]:
    """Inside, split variables are global arrays: for Keras' code that reads or writes files.

    Args:
        variables: The split variables.
        wholes: Their global values, by id; None for zeros, of which this rank keeps its slice
            at the end.
        others: Where this rank alone reads a file: those that get their slices of it, too.
    """
    before = []
    try:
        for variable, layout in variables:
            before.append((variable, layout, variable._value, variable._shape))
            shape = global_shape(variable)
            if wholes is None:
                value = np.zeros(shape, variable._value.dtype.as_numpy_dtype)
            else:
                value = wholes[id(variable)]
            with tf.init_scope(), tf.device("/CPU:0"):
                variable._value = tf.Variable(value, trainable=False)
            variable._shape = shape
        yield
        if wholes is None:
            for variable, layout, local, _ in before:
                whole = tf.convert_to_tensor(variable._value)
                if others is not None:
                    whole = broadcast(whole, others, name="restored")
                local.assign(deep_copy(layout.shard_of_global(whole.numpy())))
    finally:
        for variable, _, local, shape in before:
            variable._value, variable._shape = local, shape
