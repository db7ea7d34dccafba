"""The patched functions of Keras, and the reason for each.

`model.fit` is code of Keras, which calls strategies through `tf.distribute`. Functions that need more are
patched here, once, when the first strategy is created. Each patch calls Keras' original function, has no
effect outside a tfdist strategy, and checks the signature that it relies on, to detect an incompatible Keras.
"""

import importlib
import pkgutil

from tfdist.backend.keras.patching import apply_patches
from tfdist.backend.keras.private import check_signatures
from tfdist.strategies.keras_patches import metric_reads
from tfdist.utils.lazy import find_addon

__all__ = ["install"]

_ALL = [
    importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)
]
#: The modules here that patch functions: no two of them the same one.
_MODULES = [module for module in _ALL if hasattr(module, "PATCHES")]


def install() -> None:
    """Patches Keras' functions; a second call does nothing."""
    check_signatures()
    for module in _MODULES:
        apply_patches(module.PATCHES)
    kernels = find_addon("cpu_kernels")
    if kernels is not None:
        apply_patches(kernels.PATCHES)
    metric_reads.install()
