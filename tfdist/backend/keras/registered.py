"""Registered classes of tfdist, which Keras finds by name before their modules are imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tfdist.backend.keras.patching import Patches, apply_patches
from tfdist.backend.keras.private import object_registration

PATCHES = Patches()

PACKAGE = "tfdist"
_modules: dict[str, str] = {}


def find_in(modules: Mapping[str, str]) -> None:
    """Has Keras import the module of a registered class when a saved model contains the class.

    Args:
        modules: The module of each class, by the registered name without its package.
    """
    _modules.update(modules)
    apply_patches(PATCHES)


@PATCHES.of(object_registration, "get_registered_object")
def _get_registered_object(name, custom_objects=None, module_objects=None, *, original):
    found = original(name, custom_objects, module_objects)
    package, _, own = name.partition(">") if isinstance(name, str) else ("", "", "")
    if found is None and package == PACKAGE and own in _modules:
        importlib.import_module(_modules[own])
        found = original(name, custom_objects, module_objects)
    return found
