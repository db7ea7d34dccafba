"""Packages that extend tfdist through the entry-point group `tfdist.plugins`.

A package names a function in its metadata, for example

    [project.entry-points."tfdist.plugins"]
    my_schedules = "my_package.plugin:register"

which is called, without arguments, before the first strategy is created.
"""

from __future__ import annotations

import functools
import importlib.metadata

GROUP = "tfdist.plugins"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Calls the functions of all plug-ins, once per process.

    Returns:
        The names of the plug-ins, with the versions of their packages, in order.

    Raises:
        ImportError: A plug-in cannot be imported.
        TypeError: A plug-in does not name a function.
    """
    found = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda each: each.name):
        version = "" if entry.dist is None else f" {entry.dist.version}"
        try:
            function = entry.load()
        except Exception as error:
            raise ImportError(
                f"The plug-in {entry.name!r} ({entry.value}{version}) cannot be loaded: {error}. "
                "Repair or uninstall its package."
            ) from error
        if not callable(function):
            raise TypeError(
                f"A plug-in must name a function. Received: {entry.value}, a {type(function).__name__}, "
                f"of the plug-in {entry.name!r}."
            )
        function()
        found.append(f"{entry.name}{version}")
    return tuple(found)
