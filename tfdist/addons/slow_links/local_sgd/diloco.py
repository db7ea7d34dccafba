"""DiLoCo: many local steps, and an outer SGD with Nesterov momentum on their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.local_sgd.background import Background
from tfdist.addons.slow_links.local_sgd.local import LocalOptimizer
from tfdist.addons.slow_links.local_sgd.local_state import when
from tfdist.collectives.run import over_host
from tfdist.utils import checks

#: This rank's pseudo-gradients that are being averaged.
_SENT = "sent"


@keras.saving.register_keras_serializable(package="tfdist")
class DiLoCo(LocalOptimizer):
    """Distributed low-communication training.

    With global parameters x, and the average d over ranks of their differences from the local parameters:

        m = outer_momentum * m + d
        x = x - outer_learning_rate * (d + outer_momentum * m)      nesterov=True
        x = x - outer_learning_rate * m                             nesterov=False

    `outer_learning_rate=1` and `outer_momentum=0` is `LocalSGD`.

    ```python
    inner = keras.optimizers.AdamW(4e-4, weight_decay=0.1)
    with strategy.scope():
        model.compile(tfdist.addons.slow_links.DiLoCo(inner, sync_every=500), loss)
    model.fit(...)
    ```

    Streaming: with `fragments` parameters are split into that number of parts, which are synchronized in
    turn: each every `sync_every` steps, and no sync includes more than one part. With `overlap` training
    continues while a part is sent: the outer step is applied `overlap` steps later, and a rank's
    parameters become `mixing` times its own plus `1 - mixing` times the global ones.

    Sources: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv:2311.08105; Douillard et al. 2025, "Streaming DiLoCo with overlapping
    communication", arXiv:2501.18512.

    Args:
        inner: The optimizer of the local steps, or its name; AdamW in the paper.
        sync_every: The number of steps from one sync to the next; 500 in the paper.
        outer_learning_rate: The learning rate of the outer step.
        outer_momentum: The momentum of the outer step.
        nesterov: Whether the momentum is Nesterov's.
        fragments: The number of parts of the parameters; `sync_every` must be a multiple of it.
        overlap: The number of steps after which the result of a sync is applied; smaller than the number
            of steps between the syncs of two parts. 0: training waits for the result.
        mixing: With `overlap`, the weight of a rank's own parameters.
        within: As in `LocalSGD`.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is not an optimizer.
        ValueError: An argument is out of range, or `inner` is not supported.
    """

    outer_slots = ("outer_momentum",)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str,
        sync_every: int,
        *,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 0.5,
        within: str | None = None,
        name: str | None = None,
    ):
        checks.number("outer_learning_rate", outer_learning_rate, above=0)
        checks.number("outer_momentum", outer_momentum, minimum=0, below=1)
        checks.boolean("nesterov", nesterov)
        checks.integer("sync_every", sync_every, minimum=1)
        checks.integer("fragments", fragments, minimum=1)
        checks.integer("overlap", overlap, minimum=0)
        checks.number("mixing", mixing, minimum=0, below=1)
        if sync_every % fragments:
            raise ValueError(
                "`sync_every` must be a multiple of `fragments`. Received: "
                f"fragments={fragments}, sync_every={sync_every}."
            )
        if overlap and overlap >= sync_every // fragments:
            raise ValueError(
                "`overlap` must be less than the number of steps between the syncs of two fragments, "
                f"sync_every / fragments = {sync_every // fragments}. Received: overlap={overlap}."
            )
        super().__init__(inner, sync_every, within=within, name=name)
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
        self.nesterov, self.mixing = bool(nesterov), mixing
        self.fragments, self.overlap = int(fragments), int(overlap)
        self._background = Background()

    # -- the outer step -----------------------------------------------------------------------------

    def outer_step(self, values, delta, slots, shared):
        """See the class."""
        (momentum,) = slots
        momentum.assign(self.outer_momentum * tf.convert_to_tensor(momentum.value) + delta)
        step = tf.convert_to_tensor(momentum.value)
        if self.nesterov:
            step = delta + self.outer_momentum * step
        return values - self.outer_learning_rate * step

    # -- streaming ----------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        return self.fragments > 1 or self.overlap > 0

    def own_slots(self):
        """See `LocalOptimizer`."""
        return (_SENT,) if self.overlap else ()

    def end_step(self) -> None:
        """Counts the step, and synchronizes the fragments that are due."""
        if not self._streams:
            super().end_step()
            return
        self.count_step()
        for number, places in enumerate(self._cut()):
            first = (number + 1) * (self.sync_every // self.fragments)
            begin = self._sync_some if not self.overlap else self._send
            self._when(first, lambda n=number, p=places, do=begin: do(n, p))
            if self.overlap:
                self._when(first + self.overlap, lambda n=number, p=places: self._receive(n, p))

    def _when(self, first: int, function) -> None:
        """Calls a function at the step `first`, and every `sync_every` steps from then on."""
        since = self.steps_since_start - first
        is_time = tf.logical_and(since >= 0, tf.equal(since % self.sync_every, 0))
        when(is_time, function)

    def _sync_some(self, number: int, places: Sequence[int]) -> None:
        means, shared = self.averaged(self.deltas(places))
        self._apply_outer(number, places, means, shared)

    def _send(self, number: int, places: Sequence[int]) -> None:
        """Begins to average the pseudo-gradients of a fragment."""
        deltas = self.deltas(places)
        for place, delta in zip(places, deltas, strict=True):
            self.slot(_SENT, place).assign(delta)

        def begin(*own):
            self._background.start(number, lambda: self._averaged_beside(own))

        tf.py_function(begin, deltas, [])

    def _receive(self, number: int, places: Sequence[int]) -> None:
        """Applies an outer step with the fragment's average, once it is available."""

        def fetch(*own):
            if self._background.is_running(number):
                return self._background.result(number)
            # Training was resumed in between, so no average was started.
            return self._averaged_beside(own)

        sent = [tf.convert_to_tensor(self.slot(_SENT, place).value) for place in places]
        means = tf.py_function(fetch, sent, [each.dtype for each in sent]) if sent else []
        means = [tf.ensure_shape(mean, own.shape) for mean, own in zip(means, sent, strict=True)]

        def mix(own, new):
            return self.mixing * own + (1.0 - self.mixing) * new

        self._apply_outer(number, places, means, [], mix)

    def _averaged_beside(self, own: Sequence) -> Sequence:
        """The averages, by collectives that may run at the same time as those of a step."""
        with over_host():
            return self.averaged(own)[0]

    def _apply_outer(self, number: int, places, means, shared, *local) -> None:
        self.outer(places, means, shared, *local)
        if number == self.fragments - 1:
            self.average_layer_states()

    def synchronize(self) -> None:
        """Synchronizes ranks now, with all fragments; all ranks call this. Eager only."""
        if self.overlap and self.is_apart:
            steps = int(self.steps_since_start)
            for number, places in enumerate(self._cut()):
                since = steps - (number + 1) * (self.sync_every // self.fragments)
                if since >= 0 and since % self.sync_every < self.overlap:
                    self._receive(number, places)
        super().synchronize()

    def restart(self) -> None:
        """See `LocalOptimizer`."""
        self._background.discard()
        super().restart()

    def _cut(self) -> list[list[int]]:
        """The places of the parameters of each fragment: consecutive, of about equal size."""
        sizes = [int(np.prod(variable.shape)) for variable, _ in self.global_variables]
        total, passed = sum(sizes), 0
        found: list[list[int]] = [[] for _ in range(self.fragments)]
        for place, size in enumerate(sizes):
            middle = passed + size / 2
            found[min(int(middle * self.fragments / max(total, 1)), self.fragments - 1)].append(
                place
            )
            passed += size
        return found

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            **super().get_config(),
            "outer_learning_rate": self.outer_learning_rate,
            "outer_momentum": self.outer_momentum,
            "nesterov": self.nesterov,
            "fragments": self.fragments,
            "overlap": self.overlap,
            "mixing": self.mixing,
        }
