"""Names that a module imports at first use, and add-ons that may not be installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

_ADDONS = "tfdist.addons"


def lazy_names(
    module: str, homes: Mapping[str, str], rooms: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a module whose names are imported at first use.

    Args:
        module: The module's `__name__`.
        homes: The module that defines each name, by name.
        rooms: Submodules of this module.
    """

    def get(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{module}.{name}")
        if name not in homes:
            # Python's own words.
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = homes[name]
        if home.startswith(f"{_ADDONS}."):
            require_addon(home.split(".")[2], f"{module}.{name}")
        return getattr(importlib.import_module(home), name)

    return get, lambda: sorted((*homes, *rooms))


@functools.cache
def find_addon(name: str) -> ModuleType | None:
    """The add-on `tfdist.addons.<name>`, or None if it is not installed."""
    try:
        spec = importlib.util.find_spec(f"{_ADDONS}.{name}")
    except ModuleNotFoundError:  # No add-ons are installed.
        return None
    return None if spec is None else importlib.import_module(f"{_ADDONS}.{name}")


def require_addon(name: str, needed_for: str) -> ModuleType:
    """The add-on `tfdist.addons.<name>`.

    Raises:
        ImportError: The add-on is not installed.
    """
    found = find_addon(name)
    if found is None:
        raise ImportError(
            f"{needed_for} requires the add-on {_ADDONS}.{name}, which this installation of tfdist "
            "lacks. Reinstall tfdist with it."
        )
    return found
