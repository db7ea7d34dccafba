"""One step of a Keras model on a rank's part of the batch, and the weights of its gradient.

A rank's gradient is weighted by the rank's share of the samples, so that the sum over ranks is the gradient
of one process for the whole batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.backend.clock.stamps import current_stamps
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.collectives import Group, all_reduce
from tfdist.step.local_steps import group_in_step
from tfdist.step.token_split import TokenSplit


@dataclasses.dataclass(frozen=True)
class Divisors:
    """The divisors of losses that are not means over samples, in a graph of one of several micro-batches.

    Attributes:
        totals: The sums over all micro-batches and ranks, in the order in which the losses are made: [losses].
        own: Those of the micro-batch: scalars, which are added here.
    """

    totals: tf.Tensor
    own: list[tf.Tensor]

    def total(self, own: tf.Tensor) -> tf.Tensor:
        """The sum of a scalar over micro-batches and ranks."""
        self.own.append(tf.cast(own, self.totals.dtype))
        return tf.cast(self.totals[len(self.own) - 1], own.dtype)


@dataclasses.dataclass(eq=False)
class KerasStep:
    """One `train_step` or `test_step` of a Keras model, on this rank's part of the batch.

    The step computes as in a single process with only this part. The result is that of one process with the
    whole batch, because a rank's gradient is weighted by its `share` of the samples.

    Attributes:
        model: The model.
        kind: "train" or "test".
        rows: This rank's number of samples: an int if all ranks have the same number by shape, otherwise an
            int32 scalar tensor.
        group: The ranks with different samples, or different tokens of the same samples.
        in_step: The ranks that step together; None if all do. Gradients are reduced over those of them in
            `group` at every step: see `tfdist.step.local_steps`.
        arguments: The arguments of the step.
        outputs: The return value of the step, after it has returned.
        results: What it was given as the results of its metrics, and a function that reduces them over the ranks.
        metric_logs: The names of outputs that are such results; None before the step has returned.
        tokens: How sequences are split; None if each rank has whole ones.
        divisors: In the graph of a micro-batch; otherwise None.
    """

    model: Any
    kind: str
    rows: int | tf.Tensor
    group: Group
    in_step: frozenset[int] | None = None
    tokens: TokenSplit | None = None
    divisors: Divisors | None = None
    arguments: Sequence = ()
    outputs: Any = None
    results: tuple[Any, Any] = (None, None)
    metric_logs: frozenset[str] | None = None

    def note_outputs(self, outputs) -> None:
        """Records which logs are results of metrics, where they are made."""
        results = self.results[0] if isinstance(self.results[0], dict) else {}
        if self.metric_logs is None and isinstance(outputs, dict):
            self.metric_logs = frozenset(n for n, v in outputs.items() if v is results.get(n))

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have the same number of samples, and of tokens in each."""
        return isinstance(self.rows, int) and (self.tokens is None or self.tokens.is_even)

    @property
    def is_local(self) -> bool:
        """Whether some ranks do not reduce gradients with this one at this step."""
        return self.in_step is not None

    @functools.cached_property
    def gradient_group(self) -> Group:
        """The ranks whose gradients are reduced at this step."""
        return group_in_step(self.group, self.in_step)

    @functools.cached_property
    def share(self) -> tf.Tensor:
        """This rank's part of the samples of the step, or of their tokens: a float32 scalar."""
        return self._share_among(self.group)

    @functools.cached_property
    def gradient_share(self) -> tf.Tensor:
        """The same for the samples whose gradients are reduced together with this rank's."""
        return self._share_among(self.gradient_group) if self.is_local else self.share

    def _share_among(self, group: Group) -> tf.Tensor:
        if self.is_even or group.size == 1:
            return tf.constant(1.0 / group.size)
        own = self._own_samples()
        stamps = current_stamps()
        # Nothing waits for it before the gradients are computed.
        with contextlib.nullcontext() if stamps is None else stamps.background():
            total = all_reduce(own, group, name="batch-size")
        # All ranks that step together may have no rows; then they skip the step.
        return tf.math.divide_no_nan(tf.cast(own, tf.float32), tf.cast(total, tf.float32))

    def _own_samples(self):
        return self.rows if self.tokens is None else self.rows * self.tokens.count()

    @functools.cached_property
    def has_samples(self) -> tf.Tensor | None:
        """Whether the ranks that step together have samples: a bool scalar; None if they surely do."""
        if not self.is_local or self.is_even:
            return None
        own = tf.convert_to_tensor(self._own_samples())
        return all_reduce(own, self.gradient_group, name="samples-in-step") > 0

    @property
    def tokens_to_mean(self) -> tf.Tensor | float:
        """This rank's number of tokens of a sequence, divided by the mean of the ranks that share it."""
        if self.tokens is None or self.tokens.is_even:
            return 1.0
        mean = tf.cast(self.tokens.total, tf.float32) / self.tokens.parts
        return tf.cast(self.tokens.count(), tf.float32) / mean

    def share_of(self, local: tf.Tensor) -> tf.Tensor:
        """The ratio of `local / (global sum of local)` to `gradient_share`; 1 if samples have equal weights.

        A loss that is divided by something other than the number of samples (a mask, weights) is multiplied
        by this, so that the gradient is right after it is weighted by the share.
        """
        if self.divisors is not None:
            total = self.divisors.total(local)
        else:
            total = all_reduce(local, self.gradient_group, name="loss-divisor")
        return tf.math.divide_no_nan(local, total * tf.cast(self.gradient_share, local.dtype))


def weighted(collective: Callable, tensors, step: KerasStep | None):
    """A collective over ranks with different rows or tokens, with the gradient of one process.

    Args:
        collective: A function of the tensors that returns one tensor, with the gradient of the sum of all
            ranks' losses.
        tensors: A tensor of this rank, or a tuple of tensors.
        step: The current Keras step; None outside of one.
    """
    several = tensors if isinstance(tensors, tuple) else (tensors,)
    if step is None or step.is_even:
        return collective(*several)
    own = [with_local_gradient(tensor, step) for tensor in several]
    return with_global_gradient(collective(*own), step)


def with_global_gradient(tensor, step: KerasStep | None):
    """The tensor; its gradients become those of the global loss, and not of this rank's.

    The loss of a step is the sum over ranks of share times local loss, but each rank differentiates its
    local loss, and is multiplied by its share at the end (`GradientPath.weigh`). Values that ranks compute
    from each other's rows have gradients from several ranks' losses, which must be weighted before they are
    added up. So such a computation begins with `with_local_gradient` and ends with this function.

    Args:
        tensor: An output of the computation, for this rank's rows.
        step: The current Keras step. Without one, gradients are of the sum of all losses anyway.
    """
    return _with_gradient(tensor, step, tf.math.multiply_no_nan)


def with_local_gradient(tensor, step: KerasStep | None):
    """The tensor; its gradients become those of this rank's loss again: see `with_global_gradient`.

    Args:
        tensor: An input of the computation, for this rank's rows.
        step: The current Keras step; None outside of one.
    """
    return _with_gradient(tensor, step, tf.math.divide_no_nan)


def _with_gradient(tensor, step: KerasStep | None, weigh: Callable):
    """The tensor, whose gradient is multiplied or divided by this rank's share."""
    if step is None:
        return tensor
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        return tensor

    def gradient(dy):
        return weigh(dy, tf.cast(step.gradient_share, dy.dtype))

    return custom_gradient(lambda x: (tf.identity(x), gradient))(tensor)
