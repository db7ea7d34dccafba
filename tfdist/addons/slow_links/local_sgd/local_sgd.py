"""Local SGD: parameters are averaged every so many steps."""

from __future__ import annotations

import keras

from tfdist.addons.slow_links.local_sgd.local import LocalOptimizer


@keras.saving.register_keras_serializable(package="tfdist")
class LocalSGD(LocalOptimizer):
    """Local SGD, with any inner optimizer: every `sync_every` steps parameters are averaged.

    ```python
    with strategy.scope():
        model.compile(tfdist.addons.slow_links.LocalSGD("adamw", sync_every=20), loss)
    model.fit(...)
    ```

    Between two syncs no gradient leaves a rank: see docs/local_sgd.md. Batches count, also those of
    which the inner optimizer accumulates the gradients.

    Source: Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.

    Args:
        inner: The optimizer of the local steps, or its name. Its state is each rank's own.
        sync_every: The number of steps from one sync to the next.
        within: Which ranks still reduce gradients at every step, and train as one: None for those
            alone that share a model (over the tensor, pipeline, expert and context axes), "host" for
            all whose models lie on the same hosts, or the name of an axis of one's own.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is no optimizer.
        ValueError: An argument is out of its range, or `inner` cannot be used so.
    """

    def outer_step(self, values, delta, slots, shared):
        """The average of the ranks' parameters."""
        return values - delta
