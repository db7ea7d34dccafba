"""The state of compressed gradients in checkpoints: the step, residuals and compressors' states."""

from __future__ import annotations

import logging

import keras

from tfdist.addons.slow_links.state import RESIDUAL, CompressionState
from tfdist.collectives import Group
from tfdist.sharding.kept import Kept, KeptState, VariableKey
from tfdist.sharding.layout import layout_of
from tfdist.step.context import DistributedStrategy

_logger = logging.getLogger("tfdist")
_STEPS = "steps"


class KeptCompression(KeptState):
    """The compression of a model's gradients. Residuals belong to one rank of one mesh.

    Args:
        model: The model.
        state: The state of its optimizer's compression.
        strategy: The strategy.
    """

    name = "compression"

    def __init__(self, model: keras.Model, state: CompressionState, strategy: DistributedStrategy):
        self._state, self._strategy = state, strategy
        self._variables = {id(variable): variable for variable in model.trainable_variables}
        self._is_of_another_mesh = False

    def prepare(self, saved):
        """See `KeptState.prepare`."""
        of_variables = [key for key in saved if isinstance(key, VariableKey)]
        self._is_of_another_mesh = _STEPS in saved and not of_variables
        for key in of_variables:
            is_compressed = self._state.compressor.selects(tuple(key.variable.shape))
            if key.name == RESIDUAL and is_compressed:
                self._state.slots_of(key.variable, self._group(key.variable))

    def arrays(self):
        """See `KeptState.arrays`."""
        found: dict = {_STEPS: Kept(self._state.step)}
        for key, slots in self._state.slots.items():
            if key in self._variables:
                for name, slot in slots.items():
                    found[VariableKey(self._variables[key], name)] = Kept(slot, own_rank=True)
        return found

    def missing(self, keys):
        """See `KeptState.missing`: residuals begin at zero."""
        for key in keys:
            if isinstance(key, VariableKey):
                first = self._state.initial(key.variable, self._group(key.variable))
                self._state.slots[id(key.variable)][key.name].assign(first[key.name])
        if self._is_of_another_mesh and self._strategy.is_chief:
            _logger.warning(
                "The checkpoint has a different mesh: the residuals of compressed gradients begin at zero."
            )

    def _group(self, variable) -> Group:
        return self._strategy.group(*layout_of(variable).gradient_axes(self._strategy.mesh))
