"""Updates that are computed for all parameters at once, because ranks exchange parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.addons.optimizers.attributes import parameters
from tfdist.backend.keras.attributes import place_of
from tfdist.sharding.layout import VariableLayout, layout_of
from tfdist.utils.temporary import attributes_set


class _Updates:
    def __init__(self):
        self.found: list[tuple] = []


class JointUpdates:
    """A base of optimizers that postpone the updates of parameters of which ranks hold parts.

    `update_step` calls `postpone`; `update_postponed` receives all of them, so that they share collectives.
    """

    #: Slices and shards of parameters are updated as one process updates the whole.
    elementwise = True

    # Not a list: Keras would track it.
    _postponed: _Updates | None = None

    @contextlib.contextmanager
    def joint_update(self) -> Iterator[None]:
        """A context around the update steps of one update."""
        postponed = _Updates()
        with attributes_set(self, _postponed=postponed):
            yield
        if postponed.found:
            self.update_postponed(postponed.found)

    def postpone(self, *update: Any) -> None:
        """Keeps arguments for `update_postponed`."""
        if self._postponed is None:
            raise RuntimeError(
                f"{type(self).__name__} updates parts of parameters only by `optimizer.apply`."
            )
        self._postponed.found.append(update)

    def update_postponed(self, updates: list) -> None:
        """Updates parameters.

        Args:
            updates: The arguments of each call of `postpone`.
        """
        raise NotImplementedError

    def parameter_of(self, variable) -> keras.Variable:
        """The Keras variable for the argument of `update_step`."""
        return parameters(self)[place_of(self)(variable)]


def is_split(layout: VariableLayout) -> bool:
    """Whether a rank updates only a part of a parameter."""
    return layout.slice is not None or layout.gradient_shard is not None


def split_layout(parameter: keras.Variable) -> VariableLayout | None:
    """The layout of a parameter of which a rank updates only a part; None for a whole one."""
    layout = layout_of(parameter)
    return layout if is_split(layout) else None
