"""Local SGD: parameters are averaged every `sync_every` steps."""

from __future__ import annotations

import keras

from tfdist.addons.slow_links.local_sgd.local import LocalOptimizer


@keras.saving.register_keras_serializable(package="tfdist")
class LocalSGD(LocalOptimizer):
    """Local SGD with any inner optimizer: parameters are averaged every `sync_every` steps.

    ```python
    with strategy.scope():
        model.compile(tfdist.addons.slow_links.LocalSGD("adamw", sync_every=20), loss)
    model.fit(...)
    ```

    Between two syncs no gradients are sent: see tfdist/addons/slow_links/README.md. Steps are counted in batches, also
    if the inner optimizer accumulates gradients.

    Source: Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.

    Args:
        inner: The optimizer of the local steps, or its name. Each rank has its own state of it.
        sync_every: The number of steps from one sync to the next.
        within: The ranks that still reduce gradients at every step, and train as one: None for only
            those that share a model (over the tensor, pipeline, expert and context axes), "host" for
            all whose models are on the same hosts, or the name of a custom axis.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is not an optimizer.
        ValueError: An argument is out of range, or `inner` is not supported.
    """

    def outer_step(self, values, delta, slots, shared):
        """The average of the ranks' parameters."""
        return values - delta
