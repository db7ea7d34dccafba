"""What the package exports."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

__all__ = ["is_addon", "public_objects"]

#: Stock Keras and KerasHub models: a plan is all that most programs need, `tfdist.parallelize`.
_WITH_ADDONS = ("tfdist.addons.", "tfdist.tensor_parallel.")


def public_objects() -> dict[str, Any]:
    """By full name, what `__all__` of tfdist and of its rooms names, the rooms themselves left out."""
    found = {}
    rooms = ["tfdist"]
    for room in rooms:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                rooms.append(f"{room}.{name}")
            else:
                found[f"{room}.{name}"] = value
    return found


def is_addon(name: str) -> bool:
    """Whether a public name is listed in `docs/api_addons.txt`, and not in `docs/api.txt`."""
    return name.startswith(_WITH_ADDONS)
