"""Add-ons: optional features, each of which can be left out.

They use the public names of tfdist and the modules that `pyproject.toml` lists for each.
"""

import importlib
import pkgutil

__all__ = [each.name for each in pkgutil.iter_modules(__path__)]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(
            f"Add-on {name!r} not found in tfdist. Available: {', '.join(sorted(__all__))}."
        )
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
