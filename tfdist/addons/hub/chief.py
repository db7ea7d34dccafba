"""Files that the chief writes from weights that are gathered one layer at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import all_gather
from tfdist.sharding.layout import whole_value
from tfdist.sharding.parts import Slice
from tfdist.step.context import strategy_of
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.saving import run_on_chief
from tfdist.strategies.keras_patches.splits import SAVED, global_arrays, split_variables
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states

#: The most bytes of a rank's part that are gathered at a time.
_BLOCK_BYTES = 1 << 20


class Chief:
    """The rank that writes files of a model; all ranks call the same methods in the same order.

    Args:
        model: The model.
        name: What is called, for messages.

    Attributes:
        is_here: Whether this is the rank that writes.
    """

    def __init__(self, model: keras.Model, name: str):
        self._model, self._name = model, name
        strategy: Any = strategy_of(model)
        self._strategy = strategy
        self._has_others = strategy is not None and strategy.group().size > 1
        self.is_here = not self._has_others or strategy.is_chief

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, the model has its global state, and weights are gathered."""
        with global_parameters(self._model):
            if self._has_others:
                synchronize_layer_states(self._model)
            yield

    def run(self, function: Callable):
        """The result of a function on the chief, None on other ranks; all ranks raise its exception."""
        if not self._has_others:
            return function()
        return run_on_chief(function, self._strategy, self._name)

    @contextlib.contextmanager
    def whole(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Inside, some variables are global arrays on the chief, and as they were on other ranks."""
        wholes = self.gathered(variables)
        with global_arrays(self._some(variables), wholes) if self.is_here else nullcontext():
            yield

    def gathered(self, variables: Sequence[keras.Variable]) -> dict[int, np.ndarray]:
        """The global arrays of those variables that are split, by their ids, on the chief."""
        found: dict[int, np.ndarray] = {}
        for variable, layout in self._some(variables):
            part = layout.slice
            in_blocks = isinstance(part, Slice) and part.sizes is None and len(part.shape) > 1
            if in_blocks and layout.flat is None and layout.stage is None:
                whole: np.ndarray | None = self._in_blocks(variable, part)
            else:
                whole = whole_value(variable, SAVED).numpy()
            if whole is not None and self.is_here:
                found[id(variable)] = whole
        return found

    def _in_blocks(self, variable: keras.Variable, part: Slice) -> np.ndarray | None:
        """The global array, gathered in blocks: TensorFlow keeps the memory of what was gathered."""
        other = 0 if part.dim else 1
        value = tf.convert_to_tensor(variable.value)
        size, dtype = part.shape[other], value.dtype
        entries = value.shape.num_elements() // size
        rows = max(_BLOCK_BYTES // (entries * dtype.size), 1)
        whole = np.empty(part.shape, dtype.as_numpy_dtype) if self.is_here else None
        for begin in range(0, size, rows):
            block = [slice(None)] * len(part.shape)
            block[other] = slice(begin, min(begin + rows, size))
            gathered = all_gather(value[tuple(block)], part.group, part.dim, name=SAVED)
            if whole is not None:
                kept = [slice(None)] * len(part.shape)
                kept[part.dim] = slice(part.shape[part.dim])  # Without the padding.
                whole[tuple(block)] = gathered[tuple(kept)].numpy()
        return whole

    def _some(self, variables: Sequence[keras.Variable]) -> list:
        """Those of some variables that are split, with their layouts."""
        wanted = {id(variable) for variable in variables}
        return [each for each in self._split if id(each[0]) in wanted]

    @functools.cached_property
    def _split(self) -> list:
        return split_variables(self._model)
