"""The patched functions of Keras, and the reason for each.

`model.fit` is code of Keras, which calls strategies through `tf.distribute`. Functions that need more are
patched here, once, when the first strategy is created. Each patch calls Keras' original function, has no
effect outside a tfdist strategy, and checks the signature that it relies on, to detect an incompatible Keras.
"""

from tfdist.backend.keras.patching import apply_patches
from tfdist.backend.keras.private import check_signatures
from tfdist.strategies.keras_patches import (
    batch_losses,
    batches,
    data,
    empty_batches,
    loss_scale,
    losses,
    metric_reads,
    metrics,
    normalization,
    optimizers,
    parameters,
    randomness,
    saving,
    tapes,
    trainer,
    writers,
)
from tfdist.utils.lazy import find_addon

__all__ = ["install"]

_MODULES = (
    batch_losses,
    batches,
    data,
    loss_scale,
    losses,
    metrics,
    normalization,
    optimizers,
    parameters,
    empty_batches,
    randomness,
    saving,
    tapes,
    trainer,
    writers,
)


def install() -> None:
    """Patches Keras' functions; a second call does nothing."""
    check_signatures()
    for module in _MODULES:
        apply_patches(module.PATCHES)
    kernels = find_addon("cpu_kernels")
    if kernels is not None:
        apply_patches(kernels.PATCHES)
    metric_reads.install()
