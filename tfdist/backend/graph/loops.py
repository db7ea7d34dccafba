"""Detects calls of a function by TensorFlow's loops.

The graph does not show them: `vectorized_map` traces its function like any other, and rewrites it later.
The Python stack does; `tests/backend/graph/test_loops.py` fails if TensorFlow's modules are moved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

#: The modules of loops that call a function once for each row of a tensor.
_FOR_ROWS = frozenset(
    ["tensorflow.python.ops.map_fn", "tensorflow.python.ops.parallel_for.control_flow_ops"]
)
_LOOPS = _FOR_ROWS | {"tensorflow.python.ops.while_loop"}


def is_called_by_loop(outermost: CodeType | None = None) -> bool:
    """Whether a loop calls the calling function.

    Args:
        outermost: The code of a function; loops outside its call do not count.
    """
    return _is_called_by(_LOOPS, outermost)


def is_called_for_rows() -> bool:
    """Whether the calling function is called for each row of a tensor."""
    return _is_called_by(_FOR_ROWS, None)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, the caller of that, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_called_by(modules: frozenset[str], outermost: CodeType | None) -> bool:
    for frame in callers(sys._getframe(2)):
        if frame.f_code is outermost:
            return False
        if frame.f_globals.get("__name__") in modules:
            return True
    return False
