"""A program of a strategy, on ranks of any mesh and in one process of plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.strategies.programs import in_one_process
from tfdist import Mesh

__all__ = ["check", "compare", "on_mesh", "outcome"]


def outcome(model, history: dict | None = None, *, staged: bool = False, **more) -> dict[str, Any]:
    """What is compared: the logs, the global weights, and what else is given.

    Args:
        model: The model.
        history: The logs.
        staged: Whether ranks hold other layers, so that weights are not compared.
        **more: Numbers, texts, arrays and nests of these.
    """
    from tfdist.sharding import whole_value

    held = [] if staged else model.weights
    weights = {f"{i}": np.asarray(whole_value(weight)) for i, weight in enumerate(held)}
    return {"history": history or {}, "weights": weights, **more}


def on_mesh(program, mesh: Mesh, options: dict):
    from tfdist.testing import strategy

    return program(strategy(mesh, **options))


def check(
    pool,
    one_process,
    program,
    mesh: Mesh | None = None,
    *,
    tolerance: float = 1e-5,
    timeout: float = 200,
    **options,
) -> list:
    """Every rank has what one process has; returns what the ranks had."""
    expected = one_process.run(in_one_process, program, timeout=timeout)[0]
    results = pool.run(on_mesh, program, mesh or Mesh(), options, timeout=timeout)
    for rank, result in enumerate(results):
        compare(f"rank {rank}", result, expected, tolerance)
    return results


def compare(what: str, got, expected, tolerance: float) -> None:
    """Compares nests of numbers and texts."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), f"{what}: {sorted(got)}, not {sorted(expected)}"
        for name, value in expected.items():
            compare(f"{what} {name}", got[name], value, tolerance)
    elif isinstance(expected, str | bytes | bool | type(None)):
        assert got == expected, f"{what}: {got!r}, not {expected!r}"
    else:
        np.testing.assert_allclose(
            np.asarray(got, "float64"),
            np.asarray(expected, "float64"),
            rtol=tolerance,
            atol=tolerance,
            err_msg=what,
        )
