"""The table of `docs/code_tour.md` that lists what of Keras is wrapped, from `PATCHES`.

`python -m tests.strategies.patch_table` renews it.
"""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path

from benchmarks.measuring import write_between
from tfdist.strategies import keras_patches
from tfdist.utils.lazy import find_addon

__all__ = ["DOCUMENT", "MARK", "table", "wrapping_modules"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "code_tour.md"
MARK = "what of Keras is wrapped"


def wrapping_modules() -> list:
    """The modules that wrap something, by name."""
    found = []
    for module in pkgutil.iter_modules(keras_patches.__path__):
        loaded = __import__(f"{keras_patches.__name__}.{module.name}", fromlist=["PATCHES"])
        if hasattr(loaded, "PATCHES"):
            found.append(loaded)
    kernels = find_addon("cpu_kernels")
    return [*found, *([] if kernels is None else [kernels.updates])]


def table() -> str:
    """A line for each module: its file, the functions, and the first line of its docstring."""
    lines = ["| File | Wraps | What for |", "|---|---|---|"]
    for module in wrapping_modules():
        file = Path(inspect.getfile(module)).name
        names = [f"`{_owner(patch.owner)}.{patch.name}`" for patch in module.PATCHES]
        first = (module.__doc__ or "").splitlines()[0].rstrip(".")
        lines.append(f"| `{file}` | {', '.join(names)} | {first} |")
    return "\n".join(lines)


def _owner(owner: object) -> str:
    return getattr(owner, "__name__", str(owner)).rpartition(".")[2]


if __name__ == "__main__":
    write_between(DOCUMENT, MARK, table())
