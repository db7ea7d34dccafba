"""Where tfdist meets Keras' own code: every function of Keras that it wraps, and why.

`model.fit` is Keras' program, and most of what a strategy must know reaches it through
`tf.distribute`. What does not is wrapped here, once, when the first strategy is made. Each patch
calls Keras' own function, changes nothing outside of a tfdist strategy, and checks the signature
that it relies on, so a Keras that moved is told apart at once.
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
    """Wraps Keras' functions; a second call does nothing."""
    check_signatures()
    for module in _MODULES:
        apply_patches(module.PATCHES)
    kernels = find_addon("cpu_kernels")
    if kernels is not None:
        apply_patches(kernels.PATCHES)
    metric_reads.install()
