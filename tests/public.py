"""What the package exports."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

__all__ = ["public_objects"]


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
