"""The conformance table: every collective, dtype, size and kind of group against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import Group
from tfdist.collectives.engine import Engine
from tfdist.utils import checks

DTYPES = ("float32", "bfloat16", "bool", "float16", "int32", "int64")
#: Scalars and empty inner dims use the same code in every dtype, so the last ones test one dtype only.
_SHAPES = ((0,), (1,), (7,), (3, 5), (20_011,), (), (2, 0, 3), (100_003,))
_FEWER_SHAPES = _SHAPES[:5]


class Difference(NamedTuple):
    """A difference from NumPy.

    Attributes:
        case: The operation, its dtype and how it ran: "all_reduce mean of float16 in a graph".
        detail: The shape, the group, and the difference.
    """

    case: str
    detail: str


@dataclasses.dataclass(frozen=True)
class _Case:
    """One call of a collective on this rank, and its result by NumPy."""

    call: Callable
    argument: np.ndarray
    expected: Any
    variant: str = ""
    detail: str = ""


def differences(engine: Engine, operation: str, dtypes: Sequence[str] = DTYPES) -> list[Difference]:
    """Runs one collective over all groups of an engine's mesh; all ranks must call it.

    Args:
        engine: The engine of this rank.
        operation: The collective: one of `OPERATIONS`.
        dtypes: The dtypes: some of `DTYPES`.

    Returns:
        The differences from NumPy on this rank.

    Raises:
        RuntimeError: The engine raised an error; the message names the call.
    """
    wrong: list[Difference] = []
    for axes in _axes_of(engine):
        group = engine.group(*axes)
        for dtype in dtypes:
            cases = []
            for shape in _SHAPES if dtype == "float32" else _FEWER_SHAPES:
                for case in OPERATIONS[operation](group, dtype, shape):
                    detail = f"shape {case.argument.shape}{case.detail}, over {'+'.join(axes)}"
                    cases.append(dataclasses.replace(case, detail=detail))
            wrong += _run(cases, operation, dtype)
    return wrong


def sums_with_a_constant(engine: Engine) -> list[float]:
    """Three sums in a graph of a constant on rank 0 and of the argument on the others.

    A constant must be part of each run: on n ranks the sums are 1, n and 2n - 1. TensorFlow may remove
    the collective of a constant from the graph, if the engine does not mark it as stateful.

    Args:
        engine: The engine of this rank.
    """

    def total(x):
        own = tf.ones([3]) if engine.rank == 0 else x
        return collectives.all_reduce(own, engine.group(), name="of-a-constant")

    graph = tf.function(total, autograph=False)
    return [float(graph(tf.fill([3], float(step)))[0]) for step in range(3)]


def _axes_of(engine: Engine) -> list[tuple[str, ...]]:
    """Each axis with several ranks, and all of them together."""
    spread = tuple(axis for axis in engine.mesh.order if engine.mesh.shape[axis] > 1)
    return [(axis,) for axis in spread] + ([spread] if len(spread) > 1 else [])


def _run(cases: list[_Case], operation: str, dtype: str) -> list[Difference]:
    def outputs(arguments, mode):
        found = []
        for case, argument in zip(cases, arguments, strict=True):
            with _Named(_name(operation, case, dtype, mode), case.detail):
                found.append(case.call(argument))
        return found

    arguments = [tf.constant(case.argument) for case in cases]
    eager = outputs(arguments, "eagerly")
    # All in one function, so that many collectives of one graph run at the same time.
    graph = tf.function(partial(outputs, mode="in a graph"), autograph=False)
    with _Named(f"{operation} of {dtype} in a graph", "all shapes at a time"):
        in_graph = graph(arguments)
    wrong = []
    for mode, found in (("eagerly", eager), ("in a graph", in_graph)):
        for case, got in zip(cases, found, strict=True):
            parts = zip(tf.nest.flatten(got), tf.nest.flatten(case.expected), strict=True)
            for what in filter(None, (_compared(part.numpy(), right) for part, right in parts)):
                name = _name(operation, case, dtype, mode)
                wrong.append(Difference(name, f"{case.detail}: {what}"))
    return wrong


class _Named:
    """Adds the call to errors that are raised in the context."""

    def __init__(self, case: str, detail: str):
        self._case, self._detail = case, detail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        # An inner context may have added it already.
        if isinstance(error, Exception) and not isinstance(error, _EngineRaised):
            said = f"it raised {type(error).__name__}: {checks.one_line(error)}"
            message = f"{self._case}: {self._detail}: {said}"
            raise _EngineRaised(message) from error


class _EngineRaised(RuntimeError):
    """An engine's operation raised an error."""


def _name(operation: str, case: _Case, dtype: str, mode: str) -> str:
    return f"{operation}{case.variant} of {dtype} {mode}"


def _compared(got: np.ndarray, right: np.ndarray) -> str:
    """A description of the difference; "" if there is none."""
    expected = (right.dtype, np.shape(right))
    if (got.dtype, got.shape) != expected:
        return f"it is {got.dtype.name} {got.shape}, not {right.dtype.name} {np.shape(right)}"
    differ = np.atleast_1d(got != right)
    if not differ.any():
        return ""
    at = np.unravel_index(int(np.argmax(differ)), differ.shape)
    values = np.atleast_1d(got)[at], np.atleast_1d(right)[at]
    return (
        f"{differ.sum()} of {differ.size} values differ, the first is {values[0]}, not {values[1]}"
    )


def _value(rank: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([rank, len(shape), sum(shape)])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    # Small integers: their sums are exact in every dtype, in any order.
    return random.integers(-8, 9, shape).astype(kind)


def _values(group: Group, dtype: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    return [_value(rank, dtype, shape) for rank in group.ranks]


def _reduced(parts: np.ndarray, dtype: str, reduction: str) -> np.ndarray:
    wide = parts.astype("float64") if "float" in dtype else parts
    return getattr(wide, reduction)(axis=0).astype(parts.dtype)


def _all_reduce(group: Group, dtype: str, shape) -> Iterator[_Case]:
    parts = np.stack(_values(group, dtype, shape))
    for reduction in ("sum", "mean", "max", "min"):
        if dtype == "bool" and reduction in ("sum", "mean"):
            continue
        # Thirds are not exact; sums and halves test the same code.
        if reduction == "mean" and (dtype.startswith("int") or group.size & (group.size - 1)):
            continue
        yield _Case(
            partial(collectives.all_reduce, group=group, reduction=reduction),
            parts[group.rank],
            _reduced(parts, dtype, reduction),
            f" {reduction}",
        )


def _all_gather(group: Group, dtype: str, shape) -> Iterator[_Case]:
    parts = _values(group, dtype, shape)
    for axis in range(len(shape)):
        call = partial(collectives.all_gather, group=group, axis=axis)
        right = np.concatenate(parts, axis)
        yield _Case(call, parts[group.rank], right, detail=f", axis {axis}")


def _all_gather_uneven(group: Group, dtype: str, shape) -> Iterator[_Case]:
    if shape:
        # The rank at place p of the group has p rows, so the first has none.
        parts = [_value(r, dtype, (p, *shape[1:])) for p, r in enumerate(group.ranks)]
        call = partial(collectives.all_gather, group=group, uneven=True)
        yield _Case(call, parts[group.rank], np.concatenate(parts))


def _reduce_scatter(group: Group, dtype: str, shape) -> Iterator[_Case]:
    if not shape:
        return
    me, rows = group.rank, 3
    parts = np.stack(_values(group, dtype, (rows * group.size, *shape[1:])))
    for reduction in ("sum", "max", "min"):
        if dtype == "bool" and reduction == "sum":
            continue
        yield _Case(
            partial(collectives.reduce_scatter, group=group, reduction=reduction),
            parts[me],
            _reduced(parts, dtype, reduction)[rows * me : rows * (me + 1)],
            f" {reduction}",
        )


def _all_to_all(group: Group, dtype: str, shape) -> Iterator[_Case]:
    if shape:
        me = group.rank
        parts = _values(group, dtype, (2 * group.size, *shape[1:]))
        right = np.concatenate([part[2 * me : 2 * me + 2] for part in parts])
        yield _Case(partial(collectives.all_to_all, group=group), parts[me], right)


def _all_to_all_uneven(group: Group, dtype: str, shape) -> Iterator[_Case]:
    if not shape:
        return
    n, me = group.size, group.rank
    # Place p sends (p + q) % 3 rows to place q.
    splits = np.array([[(p + q) % 3 for q in range(n)] for p in range(n)], "int32")
    parts = [
        _value(r, dtype, (int(splits[p].sum()), *shape[1:])) for p, r in enumerate(group.ranks)
    ]
    starts = np.cumsum(splits, axis=1) - splits
    right = np.concatenate(
        [parts[p][starts[p, me] : starts[p, me] + splits[p, me]] for p in range(n)]
    )
    call = partial(collectives.all_to_all, group=group, splits=splits[me])
    yield _Case(call, parts[me], (right, splits[:, me]))


def _broadcast(group: Group, dtype: str, shape) -> Iterator[_Case]:
    parts = _values(group, dtype, shape)
    for root in (0, group.size - 1):
        call = partial(collectives.broadcast, group=group, root=root)
        yield _Case(call, parts[group.rank], parts[root], detail=f", root {root}")


def _send_recv(group: Group, dtype: str, shape) -> Iterator[_Case]:
    n, own = group.size, _values(group, dtype, shape)[group.rank]
    # Along a chain, as pipeline stages do; then from the last to the first.
    for source, target in [*zip(range(n - 1), range(1, n), strict=True), (n - 1, 0)]:
        way = f", from place {source} to {target}"
        if group.rank == source:
            call = partial(collectives.send, group=group, to=target)
            yield _Case(call, own, own, detail=way)
        if group.rank == target:
            call = partial(collectives.recv, group=group, source=source)
            right = _value(group.ranks[source], dtype, shape)
            yield _Case(call, np.zeros_like(own), right, detail=way)


#: The generators of the calls of a collective, by its name.
OPERATIONS: dict[str, Callable[[Group, str, tuple[int, ...]], Iterator[_Case]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather_uneven,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
