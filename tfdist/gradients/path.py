"""The path of the gradients of one `optimizer.apply`: from the tape of each rank to the update.

Keras calls, in this order, the functions that `strategies/keras_patches/optimizers.py` patches:

    apply                   weighted by this rank's share of the samples
      gradient accumulation over the micro-steps, if any
      _clip_gradients       reduced over the ranks, here and nowhere else; clipped by norms of global arrays
      _backend_update_step  under ZeRO, updates of shards

Stages (`stage.py`) are called in between. ZeRO 2 and 3 reduce before accumulation, to keep only shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tfdist.backend.clock.stamps import reducing
from tfdist.gradients.items import GradientItem, items_of
from tfdist.gradients.norms import clip_spread_gradients, weighted_square
from tfdist.gradients.origins import Origin
from tfdist.gradients.reduce import own_parts, reduce_items, sum_partial_gradients, weigh_items
from tfdist.gradients.stage import Position, Stages
from tfdist.sharding.layout import layout_of
from tfdist.sharding.updates import needs_rows
from tfdist.step.context import ReplicaContext, current_replica
from tfdist.utils.places import replace_at
from tfdist.utils.temporary import attributes_set


class GradientPath:
    """The gradients of one call of `optimizer.apply`.

    Args:
        replica: The replica context.
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        origins: Where each gradient comes from; None if all are local.
    """

    def __init__(self, replica: ReplicaContext, optimizer, variables: Sequence, origins=None):
        self._replica, self._strategy, self._optimizer = replica, replica.strategy, optimizer
        self._variables = list(variables)
        self._origins = list(origins or [Origin.LOCAL] * len(self._variables))
        self._stages, self._is_reduced = Stages(replica, optimizer), False
        self.options = self._strategy.gradient_options

    def current(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this is the current path."""
        return attributes_set(self._replica, gradient_path=self)

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """A context in which Keras does not sum gradients over the replicas: they are global."""
        return attributes_set(self._replica, sums_gradients=False)

    def weigh(self, gradients: Sequence) -> list:
        """Multiplies by this rank's share of the samples; drops variables that Keras leaves out."""
        own = own_parts(gradients, self._variables, self._origins, self._replica)
        found = weigh_items(self._items(own), self._replica)
        found = self._stages.through(Position.LOCAL, self._items(found))
        kept = [place for place, item in enumerate(self._items(found)) if item.is_gradient]
        self._variables = [self._variables[place] for place in kept]
        self._origins = [self._origins[place] for place in kept]
        if self._optimizer.gradient_accumulation_steps and self._strategy.zero_stage >= 2:
            # Reduced before they are accumulated.
            replace_at(found, kept, self.reduce([found[place] for place in kept]))
        return found

    def _items(self, gradients: Sequence) -> list[GradientItem]:
        rows = needs_rows(self._optimizer)
        return items_of(gradients, self._variables, self._origins, self._replica, rows)

    def accumulated(self, gradients: Sequence) -> list:
        """The gradients of an update, after the stages of UPDATE."""
        return self._stages.through(Position.UPDATE, self._items(gradients))

    def reduce(self, gradients: Sequence) -> list:
        """Reduces the gradients over the ranks, unless that was done."""
        if self._is_reduced:
            return list(gradients)
        self._is_reduced = True
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
        """Whether this rank holds only parts of the model's gradients."""
        return any(layout_of(variable).is_spread for variable in self._variables)

    def clip(self, gradients: Sequence) -> list:
        """Clips gradients of which several ranks hold parts."""
        return clip_spread_gradients(self._optimizer, gradients, self._variables)


def current_path() -> GradientPath | None:
    """The path of the innermost running `optimizer.apply` in a replica context of tfdist."""
    replica = current_replica()
    return None if replica is None else replica.gradient_path
