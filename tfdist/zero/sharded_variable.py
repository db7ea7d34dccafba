"""ZeRO-3: Keras variables of which a rank keeps its flat shard, whole while a layer needs them.

A layer reads `variable.value` and gets the array, as it would from any variable. What an
optimizer, a gradient tape or a file see is the shard. All parameters of an outermost layer, as of
a transformer block, are gathered in one collective when it is called, and their gradients are
reduced in one on the way back.
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
from tfdist.zero.sharded_gradients import flat_shard, packed, shard_gradients


class _Local(threading.local):
    as_shards = False

    def __init__(self):
        self.given: dict[int, tf.Tensor] = {}


_local = _Local()


class ShardedVariable(HookedVariable):
    """A Keras variable whose value lies in flat shards on the ranks of a group.

    Made of an ordinary one by `shard_variable`. To Keras it has its whole shape; reading its value
    is a collective, unless its layer has gathered it already.
    """

    #: Whether there is one in this process: each call of a layer asks.
    exist = False

    _sharding_group: Group
    _shard: weakref.ref | None = None

    @property
    def _own(self) -> Any:
        """The variable that holds the shard; None before it is there, and once it was let go."""
        return None if self._shard is None else self._shard()

    @property
    def is_whole(self) -> bool:
        """Whether it has no value yet, or stands for its global array, as while it is saved."""
        return self._own is None or stored_value(self) is not self._own

    def store(self, value) -> None:
        """Makes the memory of the shard, with its part of the first array."""
        array = value() if callable(value) else value
        array = array if isinstance(array, StoredArray) else tf.convert_to_tensor(array)
        shard = FlatShard(self._sharding_group, tuple(array.shape))
        update_layout(self, flat=shard)
        own = shard.read(array) if isinstance(array, StoredArray) else shard.local_shard(array)
        super().store(deep_copy(tf.cast(own, stored_dtype(self))))
        self._shard = weakref.ref(stored_value(self))

    @property
    def value(self):
        """The array; inside `as_shards` the variable that holds the shard."""
        if self.is_whole:
            return super().value
        if _local.as_shards:
            return self._own
        array = _local.given.get(id(self))
        if array is None:
            array = self._outside_of_its_layer()
        return autocast(self)(array)

    def _outside_of_its_layer(self) -> tf.Tensor:
        if in_stateless_scope():
            # Keras asks what shapes come out, and computes nothing.
            return tf.zeros(super().shape, stored_dtype(self))
        (array,) = gather_arrays([self], f"parameters/{self.path}")
        return array

    @property
    def shape(self):
        """That of the array; inside `as_shards` that of the shard."""
        if _local.as_shards and not self.is_whole:
            return self._own.shape
        return super().shape

    @property
    def handle(self):
        """What gradient tapes know the shard by."""
        return stored_value(self).handle

    @property
    def constraint(self):
        """As it is called: inside `as_shards` it sees the whole array, and returns a shard."""
        rule = super().constraint
        if rule is None or not _local.as_shards or self.is_whole:
            return rule
        return lambda _: self._cut(rule(read_arrays([self], f"constrained/{self.path}")[0]))

    @constraint.setter
    def constraint(self, value):
        HookedVariable.constraint.fset(self, value)

    def overwrite(self, value) -> None:
        """Assigns a whole array; inside `as_shards` a shard."""
        if self.is_whole or _local.as_shards:
            super().overwrite(value)
            return
        self._own.assign(deep_copy(self._cut(value)))
        if is_given(self):
            _renew_given(self, value)

    def _cut(self, value) -> tf.Tensor:
        return flat_shard(self).local_shard(tf.cast(value, self._own.dtype))


def shard_variable(variable: keras.Variable, group: Group) -> None:
    """Makes a Keras variable one of which this rank keeps its shard.

    Args:
        variable: The variable, with the same value on all ranks, or with none yet.
        group: The ranks.
    """
    before = stored_value(variable)
    ShardedVariable.exist = True
    variable.__class__ = ShardedVariable
    variable._sharding_group, variable._shard = group, None
    update_layout(variable, flat=FlatShard(group, tuple(variable.shape)))
    if before is not None:
        renew(variable, before)


def unshard_variable(variable: keras.Variable) -> None:
    """Makes a sharded variable an ordinary one again, with the whole array; every rank calls this."""
    if not isinstance(variable, ShardedVariable):
        return
    whole = None if variable._own is None else tf.convert_to_tensor(variable.value)
    variable.__class__ = keras.Variable
    update_layout(variable, flat=None)
    if whole is not None:
        renew(variable, whole)


@contextlib.contextmanager
def as_shards() -> Iterator[None]:
    """Inside, sharded variables are their shards: for optimizers, which work on those."""
    before, _local.as_shards = _local.as_shards, True
    try:
        yield
    finally:
        _local.as_shards = before


@contextlib.contextmanager
def given(variables: Sequence[ShardedVariable], arrays: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, reading these variables costs nothing."""
    before = {id(v): _local.given.get(id(v)) for v in variables}
    _local.given |= {id(v): array for v, array in zip(variables, arrays, strict=True)}
    try:
        yield
    finally:
        for key, array in before.items():
            if array is None:
                _local.given.pop(key, None)
            else:
                _local.given[key] = array


def _renew_given(variable: ShardedVariable, value) -> None:
    """After an assignment by the layer itself: what it reads from here on, with the gradient of a read."""
    array = _local.given[id(variable)]
    if tf.is_symbolic_tensor(array) and array.graph is not tf.compat.v1.get_default_graph():
        del _local.given[id(variable)]  # In a branch: the layer gathers it when it reads it.
        return

    @custom_gradient
    def overwritten(array):
        return tf.cast(value, array.dtype), lambda upstream: upstream

    _local.given[id(variable)] = overwritten(array)


def holds(variable: ShardedVariable, array: tf.Tensor) -> bool:
    """Whether a read gives the very array that was given."""
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

    Those that are frozen when this is called have no gradient: a collective is run whether or not
    anything takes its result, and so would be the products that it is given.

    Args:
        variables: The variables.
        name: What they serve, for messages.
        on_gradient: Called when all that takes the gradients of the arrays is in the graph, and
            before they are reduced.
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
    """Raises where parameters are gathered once for each row: ranks may have other numbers of rows.

    Raises:
        NotImplementedError: A function of `vectorized_map`, `map_fn` or `jacobian` is traced.
    """
    if not tf.executing_eagerly() and is_called_for_rows():
        raise NotImplementedError(
            "ZeRO-3 cannot gather parameters inside of `tf.vectorized_map`, `tf.map_fn` or "
            f"`tape.jacobian`. Received: a use of {name} there. Use zero_stage=2."
        )
