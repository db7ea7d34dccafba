"""Variables that a rank holds a slice of, where Keras looks at them as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, broadcast
from tfdist.layers.sharding import Sharding, detached, sharding_of, stored_flat
from tfdist.optimizers.zero.flat import FlatSharding

__all__ = ["receive_slices", "split_variables", "standing_in", "whole_values"]

Split = Sharding | FlatSharding


def split_variables(model: keras.Model) -> list[tuple[keras.Variable, Split]]:
    """The split variables of a model and its optimizer, in an order that is the same on all ranks."""
    variables = list(getattr(model, "variables", ()))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    found: dict[int, tuple] = {}
    for variable in variables:
        sharding = stored_flat(variable) or sharding_of(variable)
        if sharding is not None:
            found[id(variable)] = (variable, sharding)
    return list(found.values())


def whole_values(model: keras.Model, *, keep: bool) -> dict[int, np.ndarray]:
    """The global arrays of split variables, by the variable's id; every rank calls this.

    Args:
        model: The model.
        keep: Whether this rank wants them. One that does not holds one array at a time.
    """
    found = {}
    for variable, sharding in split_variables(model):
        whole = sharding.whole_of(variable._value, "saved").numpy()
        if keep:
            found[id(variable)] = whole
    return found


def receive_slices(model: keras.Model, group: Group) -> None:
    """What a rank does while the chief alone reads a file: gets its slices of what is read."""
    for variable, sharding in split_variables(model):
        whole = broadcast(tf.zeros(sharding.shape, variable.dtype), group, name="restored")
        variable._value.assign(detached(sharding.slice_of(whole.numpy())))


@contextlib.contextmanager
def standing_in(
    variables: Sequence[tuple[keras.Variable, Split]],
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
        for variable, sharding in variables:
            before.append((variable, sharding, variable._value, variable._shape))
            value = np.zeros(sharding.shape, variable._value.dtype.as_numpy_dtype)
            if wholes is not None:
                value = wholes[id(variable)]
            with tf.init_scope(), tf.device("/CPU:0"):
                variable._value = tf.Variable(value, trainable=False)
            variable._shape = sharding.shape
        yield
        if wholes is None:
            for variable, sharding, local, _ in before:
                whole = tf.convert_to_tensor(variable._value)
                if others is not None:
                    whole = broadcast(whole, others, name="restored")
                local.assign(detached(sharding.slice_of(whole.numpy())))
    finally:
        for variable, _, local, shape in before:
            variable._value, variable._shape = local, shape
