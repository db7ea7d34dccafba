"""Variables that are split over ranks, as the whole arrays that Keras reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, broadcast
from tfdist.sharding.layout import (
    VariableLayout,
    global_shape,
    layout_of,
    variables_of,
    whole_value,
)
from tfdist.sharding.parts import deep_copy
from tfdist.watchdog.hints import SAVED


def split_variables(model: keras.Model) -> list[tuple[keras.Variable, VariableLayout]]:
    """The split variables of a model and its optimizer, each once, in the same order on all ranks."""
    found = {id(variable): (variable, layout_of(variable)) for variable in variables_of(model)}
    return [
        (variable, layout)
        for variable, layout in found.values()
        if any(part is not None for part in (layout.flat, layout.slice, layout.stage))
    ]


def whole_values(
    variables: Sequence[tuple[keras.Variable, VariableLayout]], *, keep: bool
) -> dict[int, np.ndarray]:
    """The global arrays of split variables, by the id of the variable; all ranks must call this.

    Args:
        variables: The split variables.
        keep: Whether to return them on this rank; otherwise only one array is in memory at a time.
    """
    found = {}
    for variable, _ in variables:
        whole = whole_value(variable, SAVED).numpy()
        if keep:
            found[id(variable)] = whole
    return found


def receive_slices(model: keras.Model, group: Group) -> None:
    """Receives this rank's parts of the arrays while the chief reads a file."""
    for variable, layout in split_variables(model):
        zeros = tf.zeros(global_shape(variable), variable.dtype)
        whole = broadcast(zeros, group, name="restored")
        variable._value.assign(deep_copy(layout.shard_of_global(whole.numpy())))


@contextlib.contextmanager
def global_arrays(
    variables: Sequence[tuple[keras.Variable, VariableLayout]],
    wholes: dict[int, np.ndarray] | None,
    others: Group | None = None,
) -> Iterator[None]:
    """Inside, split variables are global arrays, for Keras' code that reads or writes files.

    Args:
        variables: The split variables.
        wholes: Their global values, by id, which are taken out; None to assign values inside, of which this rank
            stores its parts on exit.
        others: The ranks that receive their parts as well, if only this rank reads the file.
    """
    before = []
    try:
        for variable, layout in variables:
            before.append((variable, layout, variable._value, variable._shape))
            shape = global_shape(variable)
            if wholes is None:
                value = np.zeros(shape, variable._value.dtype.as_numpy_dtype)
            else:
                # No longer than until it is copied.
                value = wholes.pop(id(variable))
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
