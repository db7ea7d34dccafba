"""ZeRO-3: Keras variables of which a rank stores its flat shard, whole while a layer uses them.

A layer reads `variable.value` and receives the array, as from any variable. Optimizers, gradient tapes and
files see the shard. All parameters of an outermost layer, such as a transformer block, are gathered in one
collective when it is called, and their gradients are reduced in one collective in the backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.loops import is_called_for_rows
from tfdist.backend.graph.tapes import is_wanted
from tfdist.backend.keras.attributes import autocast, stored_dtype, stored_value
from tfdist.backend.keras.private import in_stateless_scope
from tfdist.backend.keras.stored import StoredArray
from tfdist.backend.keras.variables import HookedVariable, renew
from tfdist.collectives import Group
from tfdist.sharding.collectives import all_gather_arrays
from tfdist.sharding.layout import update_layout
from tfdist.sharding.parts import FlatShard, deep_copy
from tfdist.utils.temporary import attributes_set
from tfdist.zero.sharded_gradients import flat_shard, packed, shard_gradients


class _Local(threading.local):
    as_shards = False

    def __init__(self):
        self.given: dict[int, tf.Tensor] = {}


_local = _Local()


class ShardedVariable(HookedVariable):
    """A Keras variable whose value is stored in flat shards on the ranks of a group.

    `shard_variable` converts an ordinary variable. For Keras it has its whole shape. Reading its value is a
    collective, unless its layer has gathered it already.
    """

    #: Whether there is one in this process; checked in each call of a layer.
    exist = False

    _sharding_group: Group
    _shard: weakref.ref | None = None

    @property
    def _own(self) -> Any:
        """The variable that holds the shard; None before it is created, and after it was freed."""
        return None if self._shard is None else self._shard()

    @property
    def is_whole(self) -> bool:
        """Whether it has no value yet, or holds its global array, as while it is saved."""
        return self._own is None or stored_value(self) is not self._own

    def store(self, value) -> None:
        """Creates the variable of the shard, with its part of the initial array."""
        array = value() if callable(value) else value
        array = array if isinstance(array, StoredArray) else tf.convert_to_tensor(array)
        shard = FlatShard(self._sharding_group, tuple(array.shape))
        update_layout(self, flat=shard)
        own = shard.read(array) if isinstance(array, StoredArray) else shard.local_shard(array)
        super().store(deep_copy(tf.cast(own, stored_dtype(self))))
        self._shard = weakref.ref(stored_value(self))

    @property
    def value(self):
        """The array; inside `as_shards`, the variable that holds the shard."""
        if self.is_whole:
            return super().value
        if _local.as_shards:
            return self._own
        array = _local.given.get(id(self))
        if array is None and in_stateless_scope():
            # Keras infers the shapes of outputs, and computes nothing.
            array = tf.zeros(super().shape, stored_dtype(self))
        elif array is None:
            (array,) = gather_arrays([self], f"parameters/{self.path}")
        return autocast(self)(array)

    @property
    def shape(self):
        """The shape of the array; inside `as_shards`, of the shard."""
        if _local.as_shards and not self.is_whole:
            return self._own.shape
        return super().shape

    @property
    def handle(self):
        """The handle by which gradient tapes identify the shard."""
        return stored_value(self).handle

    @property
    def constraint(self):
        """The constraint; inside `as_shards` it is called with the whole array, and returns a shard."""
        rule = super().constraint
        if rule is None or not _local.as_shards or self.is_whole:
            return rule
        return lambda _: self._cut(rule(read_arrays([self], f"constrained/{self.path}")[0]))

    @constraint.setter
    def constraint(self, value):
        HookedVariable.constraint.fset(self, value)

    def overwrite(self, value) -> None:
        """Assigns a whole array; inside `as_shards`, a shard."""
        if self.is_whole or _local.as_shards:
            super().overwrite(value)
            return
        self._own.assign(deep_copy(self._cut(value)))
        if is_given(self):
            _renew_given(self, value)

    def _cut(self, value) -> tf.Tensor:
        return flat_shard(self).local_shard(tf.cast(value, self._own.dtype))


def shard_variable(variable: keras.Variable, group: Group) -> None:
    """Shards a Keras variable, in place.

    Args:
        variable: The variable, with the same value on all ranks, or no value yet.
        group: The ranks.
    """
    before = stored_value(variable)
    ShardedVariable.exist = True
    variable.__class__ = ShardedVariable
    variable._sharding_group, variable._shard = group, None
    update_layout(variable, flat=FlatShard(group, tuple(variable.shape)))
    if before is not None:
        renew(variable, before)


def as_shards() -> contextlib.AbstractContextManager[None]:
    """A context in which sharded variables are their shards, for optimizers."""
    return attributes_set(_local, as_shards=True)


@contextlib.contextmanager
def given(variables: Sequence[ShardedVariable], arrays: Sequence[tf.Tensor]) -> Iterator[None]:
    """A context in which reading these variables returns the given arrays."""
    before = {id(v): _local.given.get(id(v)) for v in variables}
    _local.given |= {id(v): array for v, array in zip(variables, arrays, strict=True)}
    try:
        yield
    finally:
        restored = (_local.given | before).items()
        _local.given = {key: array for key, array in restored if array is not None}


def _renew_given(variable: ShardedVariable, value) -> None:
    """Replaces the array that a layer reads after it has assigned one; the gradient stays that of a read."""
    array = _local.given[id(variable)]
    if tf.is_symbolic_tensor(array) and array.graph is not tf.compat.v1.get_default_graph():
        # In a branch: the layer gathers the variable again when it reads it.
        del _local.given[id(variable)]
        return

    @custom_gradient
    def overwritten(array):
        return tf.cast(value, array.dtype), lambda upstream: upstream

    _local.given[id(variable)] = overwritten(array)


def holds(variable: ShardedVariable, array: tf.Tensor) -> bool:
    """Whether a variable still has the array that it was given."""
    return _local.given.get(id(variable)) is array


def is_given(variable: ShardedVariable) -> bool:
    """Whether an outer layer has gathered a variable already."""
    return id(variable) in _local.given


def read_arrays(variables: Sequence[ShardedVariable], name: str) -> list[tf.Tensor]:
    """The arrays, in one collective for each dtype; without a gradient."""
    own = [tf.convert_to_tensor(variable._own) for variable in variables]
    return packed(all_gather_arrays, own, [flat_shard(v) for v in variables], name)


def gather_arrays(
    variables: Sequence[ShardedVariable],
    name: str,
    on_gradient: Callable[[], None] | None = None,
    on_reduced: Callable[[list[tf.Tensor]], None] | None = None,
) -> list[tf.Tensor]:
    """The arrays; their gradients are reduced as the strategy reduces those of any parameter.

    Variables that are frozen when this is called have no gradient: TensorFlow would run its collective, and
    compute its input, even if the result is not used.

    Args:
        variables: The variables.
        name: The name of the collectives, for messages.
        on_gradient: Called before the gradients of the arrays are reduced, when their computation is in
            the graph.
        on_reduced: Called with the gradients of the shards.
    """
    _refuse_rows(name)
    cuts = [flat_shard(variable) for variable in variables]
    trained = [place for place, variable in enumerate(variables) if variable.trainable]

    @custom_gradient
    def collect(*own):
        def gradient(*upstream):
            wanted = [p for p in trained if is_wanted(variables[p], variables[p]._own)]
            if not wanted:
                return [None] * len(variables)
            _refuse_rows(name)
            if on_gradient is not None:
                on_gradient()
            shards = shard_gradients(
                [variables[place] for place in wanted], [upstream[place] for place in wanted], name
            )
            if on_reduced is not None:
                on_reduced([getattr(shard, "values", shard) for shard in shards])
            by_place = dict(zip(wanted, shards, strict=True))
            return [by_place.get(place) for place in range(len(variables))]

        return packed(all_gather_arrays, own, cuts, name), gradient

    return list(collect(*[tf.convert_to_tensor(variable._own) for variable in variables]))


def _refuse_rows(name: str) -> None:
    """Checks that parameters are not gathered once for each row: ranks may have different numbers of rows.

    Raises:
        NotImplementedError: A function of `vectorized_map`, `map_fn` or `jacobian` is traced.
    """
    if not tf.executing_eagerly() and is_called_for_rows():
        raise NotImplementedError(
            "ZeRO-3 cannot gather parameters inside `tf.vectorized_map`, `tf.map_fn` or "
            f"`tape.jacobian`. Received: a use of {name} there. Use zero_stage=2."
        )
