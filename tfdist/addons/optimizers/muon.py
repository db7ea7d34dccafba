"""Muon, with each matrix orthogonalized by one of the ranks that hold parts of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.addons.optimizers.attributes import MatrixMuon
from tfdist.addons.optimizers.exchange import assigned_owners, on_owners, parts_of
from tfdist.addons.optimizers.joint import JointUpdates, split_layout
from tfdist.backend.keras.attributes import place_of
from tfdist.gradients.buckets import buckets
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.utils import checks

#: The bytes of whole matrices that are exchanged at once.
_SENT_BYTES = 256 << 20
#: The kernels of attention in Keras and KerasHub: [width, heads, head width] and [heads, head width, width].
#: Not of Gemma, whose queries, keys and values have kernels of [heads, width, head width].
ATTENTION_MATRICES: dict[str, int] = {
    r"(.*/)?(query|key|value)/kernel": 1,
    r"(.*/)?attention_output/kernel": 2,
}


@keras.saving.register_keras_serializable(package="tfdist")
class Muon(JointUpdates, MatrixMuon):
    """`keras.optimizers.Muon` for tensor parallelism and ZeRO, and for kernels with more than two dims.

    Updates are those of Keras. Where ranks hold parts of a matrix, its momentum is gathered on one of them,
    which computes the Newton-Schulz iteration and sends the parts of the result back. Matrices are
    distributed so that the work is balanced.

    Args:
        *args: Those of Keras, as `**kwargs`.
        matrices: Kernels with more than two dims to update as matrices, which Keras would update by AdamW:
            patterns of whole paths, and how many of the first dims are the rows; the other dims are the
            columns. For example `ATTENTION_MATRICES`.
        **kwargs: Those of Keras.

    Raises:
        ValueError: A pattern is not a regular expression, or a matrix has no rows or no columns.
        TypeError: `matrices` is not a dict.

    Source: Jordan et al., "Muon: An optimizer for hidden layers" (https://kellerjordan.github.io/posts/muon);
    Liu et al., "Muon is Scalable for LLM Training" (https://arxiv.org/abs/2502.16982).
    """

    def __init__(self, *args, matrices: Mapping[str, int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        checks.instance("matrices", matrices, Mapping, "a dict", optional=True)
        self.matrices = dict(matrices or {})
        for pattern, rows in self.matrices.items():
            checks.integer(f"matrices[{pattern!r}]", rows, minimum=1)
            try:
                re.compile(pattern)
            except (re.error, TypeError):
                meaning = "a dict whose keys are regular expressions"
                raise checks.refuse("matrices", matrices, meaning) from None

    def get_config(self):
        """The arguments."""
        return super().get_config() | {"matrices": self.matrices}

    def build(self, variables):
        """Creates the state."""
        for parameter in variables:
            self._rows_of(parameter)  # Raises before Keras marks the optimizer as built.
        super().build(variables)

    def _rows_of(self, parameter) -> int | None:
        """How many of the dims of a parameter are the rows of a matrix; None if it is not a matrix."""
        shape = global_shape(parameter)
        if len(shape) == 2:
            return 1
        for pattern, rows in self.matrices.items():
            if len(shape) > 2 and re.fullmatch(pattern, _path(parameter)):
                if rows >= len(shape):
                    raise ValueError(
                        f"`matrices` must leave dims for the columns. Received: {pattern!r}: {rows} for "
                        f"`{_path(parameter)}` of shape {shape}."
                    )
                return rows
        return None

    def is_matrix(self, parameter) -> bool:
        """Whether a parameter is updated by Muon: Keras' test, for the shape of the whole parameter."""
        path = _path(parameter)
        is_excluded = self.exclude_embeddings and "embedding" in path.lower()
        is_excluded |= any(re.search(keyword, path) for keyword in self.exclude_layers)
        return not is_excluded and self._rows_of(parameter) is not None

    def update_step(self, gradient, variable, learning_rate):
        """Updates the state and, unless ranks hold parts of it, the parameter."""
        parameter = self.parameter_of(variable)
        if not self.is_matrix(parameter):
            super().update_step(gradient, variable, learning_rate)
            return
        m = self.momentums[place_of(self)(variable)]
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        self.assign_add(m, gradient + m.value * (self.momentum - 1))
        momentum = gradient + self.momentum * m.value if self.nesterov else m.value
        rate = tf.cast(learning_rate, tf.float32 if momentum.dtype.size < 4 else momentum.dtype)
        if split_layout(parameter) is None:
            self.assign_sub(variable, self._direction(momentum, parameter, rate))
        else:
            self.postpone(momentum, variable, parameter, rate)

    def _direction(self, momentum, parameter, rate):
        """What is subtracted from a parameter, from its whole momentum."""
        matrix = tf.reshape(momentum, self._matrix_shape(parameter))
        update = tf.cast(self.zeropower_via_newtonschulz5(matrix, self.ns_steps), rate.dtype)
        found = tf.cast(self.lr_adjust(rate * update), momentum.dtype)
        return tf.reshape(found, momentum.shape)

    def update_postponed(self, updates):
        """Updates matrices of which ranks hold parts."""
        parameters = [parameter for _, _, parameter, _ in updates]
        owned = assigned_owners(
            [parts_of(layout_of(each)) for each in parameters], self._costs(parameters)
        )

        # By whole shapes: the parts of ranks can have different sizes.
        specs = [
            tf.TensorSpec(global_shape(p), u[0].dtype)
            for p, u in zip(parameters, updates, strict=True)
        ]
        for bucket in buckets(enumerate(specs), _SENT_BYTES):
            some = [updates[place] for place in bucket]

            def whole(place: int, momentum: tf.Tensor, some=some) -> tf.Tensor:
                _, _, parameter, rate = some[place]
                return self._direction(momentum, parameter, rate)

            momenta = [momentum for momentum, _, _, _ in some]
            found = on_owners(whole, momenta, [owned[place] for place in bucket], "muon")
            for direction, (_, variable, _, _) in zip(found, some, strict=True):
                self.assign_sub(variable, direction)

    def _costs(self, parameters: Sequence) -> list[float]:
        """The multiplications of the Newton-Schulz iteration of each matrix, up to a factor."""
        shapes = map(self._matrix_shape, parameters)
        return [float(rows * columns * min(rows, columns)) for rows, columns in shapes]

    def _matrix_shape(self, parameter) -> tuple[int, int]:
        shape, rows = global_shape(parameter), self._rows_of(parameter)
        return math.prod(shape[:rows]), math.prod(shape[rows:])


def _path(parameter) -> str:
    """The path of a Keras variable, or the name of a variable of TensorFlow."""
    return getattr(parameter, "path", parameter.name)
