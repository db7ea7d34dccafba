"""Files that the chief writes from weights that are gathered one layer at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfdist.step.context import strategy_of
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.saving import raise_together
from tfdist.strategies.keras_patches.splits import global_arrays, split_variables, whole_values
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states


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
        result, error = None, None
        if self.is_here:
            try:
                result = function()
            except Exception as raised:
                error = raised
        if self._has_others:
            raise_together(error, self._strategy, self._name)
        elif error is not None:
            raise error
        return result

    @contextlib.contextmanager
    def whole(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Inside, some variables are global arrays on the chief, and as they were on other ranks."""
        wanted = {id(variable) for variable in variables}
        split = [each for each in self._split if id(each[0]) in wanted]
        wholes = whole_values(split, keep=self.is_here)
        with global_arrays(split, wholes) if self.is_here else contextlib.nullcontext():
            yield

    @functools.cached_property
    def _split(self) -> list:
        return split_variables(self._model)
