"""Whether a function is being called by one of TensorFlow's loops.

The graph does not say so: `vectorized_map` traces its function like any other, and rewrites it later.
The Python stack does; `tests/backend/graph/test_loops.py` fails where TensorFlow's modules move.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

#: Those that call a function once for each row of a tensor, however many there are.
_FOR_ROWS = frozenset(
    ["tensorflow.python.ops.map_fn", "tensorflow.python.ops.parallel_for.control_flow_ops"]
)
_LOOPS = _FOR_ROWS | {"tensorflow.python.ops.while_loop"}


def is_called_by_loop(outermost: CodeType | None = None) -> bool:
    """Whether a loop calls the function that asks.

    Args:
        outermost: The code of a function; loops that have called that do not count.
    """
    return _is_called_by(_LOOPS, outermost)


def is_called_for_rows() -> bool:
    """Whether the function that asks is called for each row of a tensor."""
    return _is_called_by(_FOR_ROWS, None)


def _is_called_by(modules: frozenset[str], outermost: CodeType | None) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False
