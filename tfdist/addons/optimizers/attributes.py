"""What the optimizers here derive from: private names of Keras' optimizers, each with a check.

They are used because an update of parts replaces a part of Keras' update, which has no public names.
"""

from __future__ import annotations

import keras

from tfdist.backend.keras.attributes import Attribute
from tfdist.backend.keras.patching import check_parameters
from tfdist.backend.keras.private import BaseOptimizer

_LAMB, _ADAFACTOR = keras.optimizers.Lamb, keras.optimizers.Adafactor
# The parameters, in the order of the state.
parameters = Attribute("_trainable_variables", BaseOptimizer)
first_moments = Attribute("_momentums", _LAMB)
second_moments = Attribute("_velocities", _LAMB)
row_factors = Attribute("_r", _ADAFACTOR)
column_factors = Attribute("_c", _ADAFACTOR)
velocities = Attribute("_v", _ADAFACTOR)
# The number, schedule or function that the user gave.
given_rate = Attribute("_learning_rate", BaseOptimizer)

check_parameters(keras.optimizers.Muon, "_should_use_adamw", ("self", "variable"))


class MatrixMuon(keras.optimizers.Muon):
    """`keras.optimizers.Muon`, where a subclass determines which parameters are matrices."""

    def is_matrix(self, parameter) -> bool:
        """Whether a parameter is updated as a matrix."""
        raise NotImplementedError

    def _should_use_adamw(self, variable) -> bool:
        return not self.is_matrix(variable)
