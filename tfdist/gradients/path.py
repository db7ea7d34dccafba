"""The path of the gradients of one `optimizer.apply`: from the tape of each rank to the update.

Keras calls, in this order, what `strategies/keras_patches/optimizers.py` patches:

    apply                     LOCAL        weighted by this rank's share of the samples
      gradient accumulation                over the micro-steps, if any
      _clip_gradients         GLOBAL       reduced over the ranks, here and nowhere else
                              CLIPPED      by norms of global arrays
      _backend_update_step    UPDATED      under ZeRO by updates of shards

Stages (`stage.py`) are called in between. ZeRO 2 and 3 reduce before accumulation, to keep shards alone.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

from tfdist.backend.clock.stamps import reducing
from tfdist.gradients.clipping import clip_spread_gradients
from tfdist.gradients.flat import own_parts
from tfdist.gradients.items import GradientItem, items_of
from tfdist.gradients.norms import weighted_square
from tfdist.gradients.origins import Origin
from tfdist.gradients.reduce import reduce_items, sum_partial_gradients, weigh_gradients
from tfdist.gradients.stage import Position, Stages
from tfdist.sharding.layout import layout_of
from tfdist.sharding.updates import needs_rows
from tfdist.step.context import ReplicaContext, current_replica

State = enum.Enum("State", ["LOCAL", "GLOBAL", "CLIPPED", "UPDATED"])


class GradientPath:
    """The gradients of one call of `optimizer.apply`, on their way.

    Args:
        replica: The replica context.
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        origins: Whether the step has each global already; None: all are this rank's.
    """

    def __init__(self, replica: ReplicaContext, optimizer, variables: Sequence, origins=None):
        self._replica, self._strategy, self._optimizer = replica, replica.strategy, optimizer
        self._variables = list(variables)
        self._origins = list(origins or [Origin.LOCAL] * len(self._variables))
        self._stages, self.state = Stages(replica, optimizer), State.LOCAL
        self.options = self._strategy.gradient_options

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, this is the current path."""
        self._replica.gradient_paths.append(self)
        try:
            yield
        finally:
            self._replica.gradient_paths.pop()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, Keras' own sum of gradients over the replicas is left out: they are global."""
        self.state = State.UPDATED
        before, self._replica.sums_gradients = self._replica.sums_gradients, False
        try:
            yield
        finally:
            self._replica.sums_gradients = before

    def weigh(self, gradients: Sequence) -> list:
        """Multiplies by this rank's share of the samples; forgets variables that Keras leaves out."""
        own = own_parts(gradients, self._variables, self._origins, self._replica)
        found, mesh = weigh_gradients(own, self._replica.step), self._strategy.mesh
        for place, item in enumerate(self._items(own)):
            # Those of flat shards were weighted as they came.
            if item.is_reduced or item.overwrites or item.layout.has_global_gradient(mesh):
                found[place] = own[place]
        found = self._stages.through(Position.LOCAL, self._items(found))
        kept = [place for place, item in enumerate(self._items(found)) if item.is_gradient]
        self._variables = [self._variables[place] for place in kept]
        self._origins = [self._origins[place] for place in kept]
        return found

    def _items(self, gradients: Sequence) -> list[GradientItem]:
        rows = needs_rows(self._optimizer)
        return items_of(gradients, self._variables, self._origins, self._replica, rows)

    def accumulates_global(self) -> bool:
        """Whether gradients are reduced before they are accumulated."""
        return bool(self._optimizer.gradient_accumulation_steps) and self._strategy.zero_stage >= 2

    def accumulated(self, gradients: Sequence) -> list:
        """The gradients of an update, behind the stages of UPDATE."""
        return self._stages.through(Position.UPDATE, self._items(gradients))

    def reduce(self, gradients: Sequence) -> list:
        """Reduces the gradients over the ranks, unless that was done."""
        if self.state is not State.LOCAL:
            return list(gradients)
        self.state = State.GLOBAL
        with reducing(gradients) as reduced:
            items = self._items(sum_partial_gradients(self._items(gradients), self.options))
            by_stages = self._stages.reduced(items)
            left = [p for p, item in enumerate(items) if p not in by_stages and not item.is_reduced]
            rest = reduce_items([items[place] for place in left], self.options)
            shards = dict(zip(left, rest, strict=True))
            found = [
                shards[p] if p in shards else item.own_shard(by_stages.get(p, item.gradient))
                for p, item in enumerate(items)
            ]
            reduced(found, lambda: weighted_square(found, self._variables, self._strategy.mesh))
        return self._stages.through(Position.REDUCED, self._items(found))

    def is_spread(self) -> bool:
        """Whether this rank has a part only of the model's gradients."""
        return any(layout_of(variable).is_spread for variable in self._variables)

    def clip(self, gradients: Sequence) -> list:
        """Clips gradients that lie in parts on several ranks."""
        self.state = State.CLIPPED
        return clip_spread_gradients(self._optimizer, gradients, self._variables)


def current_path() -> GradientPath | None:
    """That of the `optimizer.apply` under way, the innermost, in a replica context of tfdist."""
    replica = current_replica()
    return replica.gradient_paths[-1] if replica is not None and replica.gradient_paths else None
