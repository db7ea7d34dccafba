"""The path of the gradients of one `optimizer.apply`: from the tape of each rank to the update.

Keras calls, in this order, what `strategies/keras_patches/optimizers.py` patches:

    apply                     LOCAL        weighed by this rank's share of the samples
      gradient accumulation                over the micro-steps, if any
      _clip_gradients         GLOBAL       reduced over the ranks, here and nowhere else
                              CLIPPED      by norms of global arrays
      _backend_update_step    UPDATED      under ZeRO by updates of shards

Over which ranks they are reduced depends on the step: under an optimizer of `tfdist.optimizers` a
rank stays in step with some only (`ReplicaContext.in_step`), and its losses are those of their rows.

Under ZeRO 2 and 3 gradients are reduced before they are accumulated: whole gradients would stand
from one micro-step to the next. Optimizers that do not clip are reduced where they update.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.compression.momentum import CompressedMomentum
from tfdist.context import ChangingAccumulation, ReplicaContext, current_replica
from tfdist.gradient_options import GradientOptions
from tfdist.gradients.clipping import clip_spread_gradients
from tfdist.gradients.compressed import compression_state, reduce_compressed
from tfdist.gradients.norms import weighted_square
from tfdist.gradients.origins import Origin
from tfdist.gradients.reduce import (
    reduce_gradients,
    rows_are_fewer,
    sum_partial_gradients,
    weigh_gradients,
)
from tfdist.gradients.reduce_scatter import reduce_scatter_gradients
from tfdist.gradients.sparse import shard_of_rows
from tfdist.local_steps import group_in_step
from tfdist.sharding.layout import VariableLayout, layout_of
from tfdist.sharding.parts import FlatShard
from tfdist.sharding.updates import needs_rows
from tfdist.step_clock import Column, current_stamps

__all__ = ["GradientPath", "State", "current_path"]


class State(enum.Enum):
    """How far the gradients have come."""

    LOCAL = enum.auto()
    GLOBAL = enum.auto()
    CLIPPED = enum.auto()
    UPDATED = enum.auto()


class GradientPath:
    """The gradients of one call of `optimizer.apply`, on their way.

    Args:
        replica: The replica context.
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        origins: Of each gradient, whether the step has it global already; None: all are this rank's.

    Attributes:
        variables: The variables.
        state: How far the gradients are.
    """

    def __init__(
        self,
        replica: ReplicaContext,
        optimizer,
        variables: Sequence,
        origins: Sequence[Origin] | None = None,
    ):
        self._replica, self._optimizer = replica, optimizer
        self._strategy = replica.strategy
        self.variables = list(variables)
        self._origins = list(origins or [Origin.LOCAL] * len(self.variables))
        self.state = State.LOCAL

    @property
    def options(self) -> GradientOptions:
        """How gradients travel."""
        return self._strategy.gradient_options

    @property
    def accumulation(self) -> ChangingAccumulation | None:
        """What changes the number of micro-steps of this optimizer's updates, if anything does."""
        found = self._strategy.accumulation
        return found if found is not None and found.optimizer is self._optimizer else None

    @property
    def _layouts(self) -> list[VariableLayout]:
        return [layout_of(variable) for variable in self.variables]

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
        """Multiplies this rank's gradients by its share of the samples of the step.

        Of what Keras leaves out from here on, the variables are no longer kept.
        """
        step = self._replica.step
        own = self._lying_flat(
            [
                self._of_its_shape(gradient, variable) if origin is Origin.LOCAL else gradient
                for gradient, variable, origin in zip(
                    gradients, self.variables, self._origins, strict=True
                )
            ]
        )
        weighed = weigh_gradients(own, step)
        rest = zip(own, weighed, self._layouts, self.variables, self._origins, strict=True)
        # Those of parameters that lie flat were weighed and reduced as they came. What Keras takes for
        # new values of variables, and not for gradients, is left alone.
        found = [
            given
            if layout.flat is not None
            or layout.has_global_gradient(self._strategy.mesh)
            or _overwrites(variable)
            or origin is not Origin.LOCAL
            else new
            for given, new, layout, variable, origin in rest
        ]
        self._measure(found)
        kept = [
            place
            for place, (gradient, variable) in enumerate(zip(found, self.variables, strict=True))
            if gradient is not None and not _overwrites(variable)
        ]
        self.variables = [self.variables[place] for place in kept]
        self._origins = [self._origins[place] for place in kept]
        return found

    def _of_its_shape(self, gradient, variable):
        """A dense gradient that a step has made itself, which may be of any shape where there are no rows.

        TensorFlow's `jacobian` of no rows, for one, has none of the dims of the variable.
        """
        step, reads = self._replica.step, self._replica.gradient_reads
        if step is None or step.is_even or reads is None or reads.is_as_taken(gradient):
            return gradient
        shard = layout_of(variable).flat
        shapes = [tuple(variable.shape), () if shard is None else (shard.share,)]
        shape = next((each for each in shapes if gradient.shape.is_compatible_with(each)), None)
        if shape is None:
            return gradient
        zeros = tf.zeros(shape, gradient.dtype)
        found = tf.cond(tf.equal(step.rows, 0), lambda: zeros, lambda: gradient)
        return tf.ensure_shape(found, shape)

    def _lying_flat(self, gradients: Sequence) -> list:
        """Whole gradients of parameters that lie flat, which the step has made, as their shards."""
        found = list(gradients)
        for place, layout in enumerate(self._layouts):
            gradient, shard = found[place], layout.flat
            if gradient is None or shard is None or self._origins[place] is Origin.PART:
                continue
            if self._origins[place] is Origin.LOCAL:
                # Of a step that hands on what tapes return it has the shape of the shard.
                is_whole = tuple(gradient.shape) == shard.array_shape
                if self._replica.gradient_reads is None or not is_whole:
                    continue
                step = self._replica.step
                (gradient,) = weigh_gradients([gradient], step)
                reduction = layout.reduction(self._strategy.mesh, step)
                (found[place],) = reduce_scatter_gradients(
                    [gradient], [shard], reduction, self.options
                )
            else:
                found[place] = _shard(gradient, shard)
        return found

    def _measure(self, gradients: Sequence) -> None:
        meter = self._strategy.noise_meter
        if meter is None:
            return
        # Under ZeRO-3 gradients are parts as the tape returns them.
        if Origin.GLOBAL in self._origins:
            raise ValueError(
                "GradientNoise compares the ranks' own gradients with the global one, so a training "
                "step must hand gradients to the optimizer as the tape returns them. Received: a "
                "train_step that reads them before."
            )
        meter.add(gradients, self.variables, self._replica.step)

    def accumulates_global(self) -> bool:
        """Whether gradients are reduced before they are accumulated."""
        return bool(self._optimizer.gradient_accumulation_steps) and self._strategy.zero_stage >= 2

    def reduce_once(self, gradients: Sequence) -> list:
        """Reduces the gradients over the ranks, unless that was done."""
        if self.state is not State.LOCAL:
            return list(gradients)
        self.state = State.GLOBAL
        found = self._reduce_stamped(gradients)
        meter = self._strategy.noise_meter
        if meter is not None:
            meter.update(found, self.variables, self._replica.step)
        return found

    def _reduce_stamped(self, gradients: Sequence) -> list:
        stamps = current_stamps()
        if stamps is None:
            return self._reduce(gradients)
        stamps.stamp(Column("gradients"), gradients)
        with stamps.background():
            found = self._reduce(gradients)
        stamps.stamp(Column("reduced"), found)
        stamps.norm(lambda: weighted_square(found, self.variables, self._strategy.mesh))
        return found

    def _reduce(self, gradients: Sequence) -> list:
        options, mesh = self.options, self._strategy.mesh
        keep_rows = needs_rows(self._optimizer)
        found, given = list(gradients), self._given()
        ours = sum_partial_gradients(
            [None if place in given else gradient for place, gradient in enumerate(found)],
            self._layouts,
            options,
        )
        places: dict[tuple[Group, str], list[int]] = {}
        for place, layout in enumerate(self._layouts):
            if place in given:
                found[place] = _shard(found[place], given[place])
                continue
            found[place] = ours[place]
            # Those of parameters that lie flat were reduced as they came.
            if layout.flat is None:
                group = self._strategy.group(*layout.gradient_axes(mesh))
                group = group_in_step(group, self._replica.in_step)
                how = group, layout.reduction(mesh, self._replica.step)
                places.setdefault(how, []).append(place)
        any_compressed = False
        for (group, reduction), every in places.items():
            some = self._reduce_compressed(
                found, every, group, reduction, begins=not any_compressed
            )
            any_compressed |= len(some) < len(every)
            wanted = [found[place] for place in some]
            shards = [self._layouts[place].state for place in some]
            if any(shard is not None for shard in shards):
                reduced = reduce_scatter_gradients(
                    wanted, shards, reduction, options, keep_rows=keep_rows
                )
            else:
                reduced = reduce_gradients(wanted, group, reduction, options, keep_rows=keep_rows)
            for place, gradient in zip(some, reduced, strict=True):
                found[place] = gradient
        if options.compression is not None:
            compression_state(self._optimizer, options.compression).end_step()
        return found

    def _given(self) -> dict[int, FlatShard | None]:
        """The places of gradients that were global before, and the shards that are taken of them."""
        return {
            place: None if layout.flat is not None or origin is Origin.PART else layout.state
            for place, (origin, layout) in enumerate(zip(self._origins, self._layouts, strict=True))
            if origin is not Origin.LOCAL
        }

    def _reduce_compressed(
        self, found: list, places: Sequence[int], group: Group, reduction: str, *, begins: bool
    ) -> list[int]:
        """Reduces those of some gradients that travel compressed; returns the places of the others."""
        compressor = self.options.compression
        if compressor is None or group.size == 1:
            return list(places)
        keep_rows = needs_rows(self._optimizer)
        some = []
        for place in places:
            gradient = found[place]
            if gradient is None or not compressor.selects(tuple(self.variables[place].shape)):
                continue
            if isinstance(gradient, tf.IndexedSlices):
                if keep_rows or rows_are_fewer(gradient, group):
                    continue
                found[place] = tf.convert_to_tensor(gradient)
            some.append(place)
        if some:
            reduced = reduce_compressed(
                [found[place] for place in some],
                [self.variables[place] for place in some],
                compression_state(self._optimizer, compressor),
                group,
                reduction,
                self.options,
                momentum=self._compressed_momentum(some),
                begins=begins,
            )
            for place, gradient in zip(some, reduced, strict=True):
                shard = self._layouts[place].state
                found[place] = gradient if shard is None else shard.local_shard(gradient)
        return [place for place in places if place not in some]

    def _compressed_momentum(self, places: Sequence[int]) -> CompressedMomentum | None:
        """The optimizer, if it is its momentum that travels."""
        optimizer, compressor = self._optimizer, self.options.compression
        if not isinstance(optimizer, CompressedMomentum) or compressor is None:
            return None
        kind = type(optimizer).__name__
        if any(self._layouts[place].state is not None for place in places):
            raise ValueError(
                f"{kind} compresses whole momentums, which ZeRO divides. Received: zero_stage="
                f"{self._strategy.zero_stage}. Leave `zero_stage` out, or take AdamW."
            )
        if compressor.start_step < optimizer.freeze_step:
            raise ValueError(
                f"{kind} travels whole until its second moments stay. Received: freeze_step="
                f"{optimizer.freeze_step}, {compressor}. Give both the same number."
            )
        return optimizer

    def is_spread(self) -> bool:
        """Whether this rank has a part only of the model's gradients."""
        return any(layout.is_spread for layout in self._layouts)

    def clip(self, gradients: Sequence) -> list:
        """Clips gradients that lie in parts on several ranks."""
        self.state = State.CLIPPED
        return clip_spread_gradients(self._optimizer, gradients, self.variables)


def _shard(gradient, shard: FlatShard | None):
    """This rank's shard of a gradient that is whole; all of it where that is None."""
    if shard is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return shard_of_rows(gradient, shard)
    return None if gradient is None else shard.local_shard(gradient)


def _overwrites(variable) -> bool:
    """Whether what stands for a variable's gradient is its new value."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def current_path() -> GradientPath | None:
    """That of the `optimizer.apply` under way, the innermost, in a replica context of tfdist."""
    replica = current_replica()
    return replica.gradient_paths[-1] if replica is not None and replica.gradient_paths else None
