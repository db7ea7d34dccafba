"""`check_engine`: tests on real ranks whether an engine conforms to `tfdist.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tfdist.mesh import Mesh
from tfdist.testing.conformance import (
    DTYPES,
    OPERATIONS,
    Difference,
    differences,
    sums_with_a_constant,
)
from tfdist.testing.pool import RankPool
from tfdist.testing.rank import MakeEngine, engine
from tfdist.utils import checks

_MOST_LINES = 60


def check_engine(
    make_engine: MakeEngine,
    num_ranks: int = 2,
    *,
    dtypes: Sequence[str] | None = None,
    timeout: float = 120.0,
) -> None:
    """Runs an engine's operations on real processes and compares the results with NumPy.

    Each operation runs with each dtype, with empty tensors, scalars and tensors of several sizes, over
    each kind of group, eagerly and many at a time in one graph. An even number of ranks above 2 has
    groups along two mesh axes.

    Args:
        make_engine: As the `engine` of a `RankPool`.
        num_ranks: The number of processes.
        dtypes: Some of "float32", "bfloat16", "bool", "float16", "int32" and "int64"; None for all.
        timeout: The longest time, in seconds, of one operation with one dtype.

    Raises:
        ValueError: The engine is wrong; the message lists the operations that differ, with the dtypes
            and differences. An operation that raised, ended a process or did not return is the last of
            the list, and the cause of this error has the tracebacks.
        Exception: The error of `make_engine`.
    """
    checks.function("make_engine", make_engine)
    checks.integer("num_ranks", num_ranks, minimum=2)
    chosen = DTYPES if dtypes is None else tuple(checks.sequence("dtypes", dtypes, "names"))
    if not chosen or not set(map(str, chosen)) <= set(DTYPES):
        raise checks.refuse("dtypes", dtypes, f"some of {', '.join(DTYPES)}")
    checks.number("timeout", timeout, above=0, maximum=checks.YEAR_SECONDS)
    mesh = Mesh(tensor=2) if num_ranks > 2 and num_ranks % 2 == 0 else Mesh()
    wrong: dict[str, list[str]] = {}
    with RankPool(num_ranks, engine=make_engine) as pool:
        name = pool.run(_name_of_engine, mesh, timeout=timeout)[0]

        def run(what: str, function: Callable, *args) -> list:
            try:
                return pool.run(function, mesh, *args, timeout=timeout)
            except Exception as error:
                said = checks.one_line(str(error).split("\n")[0])
                if not said.startswith(what.split()[0]):
                    said = f"{what}: {type(error).__name__}: {said}"
                # Later operations would run on new ranks, and may wait for the same time.
                raise ValueError(_message(name, wrong, said)) from error

        for operation in OPERATIONS:
            for dtype in chosen:
                found = run(f"{operation} of {dtype}", _differences, operation, dtype)
                _add(wrong, found)
        sums = run("all_reduce of a constant", _sums_with_a_constant)
        right = [1.0, float(num_ranks), 2.0 * num_ranks - 1]
        for rank, got in enumerate(sums):
            if got != right:
                case = "all_reduce of a constant of one rank in a graph"
                wrong.setdefault(case, []).append(
                    f"on rank {rank} three runs gave {got}, not {right}"
                )
    if wrong:
        raise ValueError(_message(name, wrong))


def _name_of_engine(mesh: Mesh) -> str:
    made = engine(mesh)
    return f"{type(made).__name__} (name={made.name!r})"


def _differences(mesh: Mesh, operation: str, dtype: str) -> list[Difference]:
    return differences(engine(mesh), operation, [dtype])


def _sums_with_a_constant(mesh: Mesh) -> list[float]:
    return sums_with_a_constant(engine(mesh))


def _add(wrong: dict[str, list[str]], answers: Iterable[list[Difference]]) -> None:
    for rank, found in enumerate(answers):
        for case, detail in found:
            wrong.setdefault(case, []).append(f"on rank {rank}, {detail}")


def _message(name: str, wrong: dict[str, list[str]], last: str = "") -> str:
    lines = []
    for case, details in wrong.items():
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        lines.append(f"{case}: {details[0]}{more}")
    hidden = len(lines) - _MOST_LINES
    if hidden > 0:
        lines[_MOST_LINES:] = [f"and {hidden} more kinds of calls"]
    lines += [last] if last else []
    operations = [*dict.fromkeys(line.split()[0] for line in [*wrong, *([last] if last else [])])]
    listed = "".join(f"\n- {line}" for line in lines)
    return (
        f"An engine's operations must return what NumPy computes from all ranks' tensors. Received: {name}, "
        f"which is wrong in {', '.join(operations)}. Correct the methods for these calls:{listed}"
    )
