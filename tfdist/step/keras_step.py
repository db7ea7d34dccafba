"""One step of a Keras model on a rank's part of the batch, and how its gradient becomes the global one.

A rank's gradient counts by the rank's share of the samples, so that the sum over ranks is the gradient that
one process has of the whole batch.
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


@dataclasses.dataclass(eq=False)
class KerasStep:
    """One `train_step` or `test_step` of a Keras model, on this rank's part of the batch.

    Inside such a step everything looks like a single process that was given this part. What
    makes the result that of one process over the whole batch is that a rank's gradient counts by
    its `share` of the samples.

    Attributes:
        model: The model.
        kind: "train" or "test".
        rows: This rank's number of samples: an int where all ranks have equally many by shape,
            else an int32 scalar tensor.
        group: The ranks that have other samples, or other tokens of the same.
        in_step: The ranks of the world that step together; None where all do. Gradients are reduced
            over those of `group` among them, at every step: see `tfdist.step.local_steps`.
        arguments: What the step is called with.
        outputs: What it has returned, once it has.
        tokens: How ranks divide the sequences; None where each has them whole.
    """

    model: Any
    kind: str
    rows: int | tf.Tensor
    group: Group
    in_step: frozenset[int] | None = None
    tokens: TokenSplit | None = None
    arguments: Sequence = ()
    outputs: Any = None

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have equally many samples, and tokens of each."""
        return isinstance(self.rows, int) and (self.tokens is None or self.tokens.is_even)

    @property
    def is_local(self) -> bool:
        """Whether some of the ranks do not reduce gradients with this one at this step."""
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
        """The same of the samples whose gradients are reduced with this rank's."""
        return self._share_among(self.gradient_group) if self.is_local else self.share

    def _share_among(self, group: Group) -> tf.Tensor:
        if self.is_even or group.size == 1:
            return tf.constant(1.0 / group.size)
        own = self._own_samples()
        stamps = current_stamps()
        # Nothing waits for it before the gradients are there.
        with contextlib.nullcontext() if stamps is None else stamps.background():
            total = all_reduce(own, group, name="batch-size")
        # Ranks that step apart from the others may all have no rows, and then make no step.
        return tf.math.divide_no_nan(tf.cast(own, tf.float32), tf.cast(total, tf.float32))

    def _own_samples(self):
        return self.rows if self.tokens is None else self.rows * self.tokens.count()

    @functools.cached_property
    def has_samples(self) -> tf.Tensor | None:
        """Whether those that step together have any: a bool scalar. None where that is known."""
        if not self.is_local or self.is_even:
            return None
        own = tf.convert_to_tensor(self._own_samples())
        return all_reduce(own, self.gradient_group, name="samples-in-step") > 0

    @property
    def tokens_to_mean(self) -> tf.Tensor | float:
        """This rank's number of tokens of a sequence, over the mean of the ranks that share it."""
        if self.tokens is None or self.tokens.is_even:
            return 1.0
        mean = tf.cast(self.tokens.total, tf.float32) / self.tokens.parts
        return tf.cast(self.tokens.count(), tf.float32) / mean

    def share_of(self, local: tf.Tensor) -> tf.Tensor:
        """What `local / (global sum of local)` is, over `share`: 1 where samples count alike.

        A loss that divides by something else than the number of samples (a mask, weights) is
        multiplied by this, so that it is right after the gradient is weighted by `share`.
        """
        total = all_reduce(local, self.gradient_group, name="loss-divisor")
        return tf.math.divide_no_nan(local, total * tf.cast(self.gradient_share, local.dtype))


def weighted(collective: Callable, tensors, step: KerasStep | None):
    """A collective among ranks with other rows or tokens, with the gradient that one process has.

    Args:
        collective: From a tensor, or from as many as there are, to one; with the gradient of the sum
            of all ranks' losses.
        tensors: A tensor of this rank, or a tuple of some.
        step: The Keras step under way, if there is one.
    """
    several = tensors if isinstance(tensors, tuple) else (tensors,)
    if step is None or step.is_even:
        return collective(*several)
    own = [with_local_gradient(tensor, step) for tensor in several]
    return with_global_gradient(collective(*own), step)


def with_global_gradient(tensor, step: KerasStep | None):
    """The tensor as it is; behind it flow gradients of the global loss, not of this rank's.

    The loss of a step is the sum over ranks of share times local loss, but each rank derives its
    local loss, and its share is multiplied in at the end (`GradientPath.weigh`). What ranks compute
    of each other's rows has gradients from several ranks' losses: those have to be weighed before
    they meet. So such a computation begins with `with_local_gradient` and ends with this.

    Args:
        tensor: What comes out of the computation, of this rank's rows.
        step: The Keras step under way. Without one, gradients are of the sum of all losses anyway.
    """
    if step is None:
        return tensor

    def times_share(dy):
        return tf.math.multiply_no_nan(dy, tf.cast(step.gradient_share, dy.dtype))

    return _with_gradient(tf.convert_to_tensor(tensor), times_share)


def with_local_gradient(tensor, step: KerasStep | None):
    """The tensor as it is; before it flow gradients of this rank's loss: see `with_global_gradient`.

    Args:
        tensor: What goes into the computation, of this rank's rows.
        step: The Keras step under way, if there is one.
    """
    if step is None:
        return tensor

    def over_share(dy):
        return tf.math.divide_no_nan(dy, tf.cast(step.gradient_share, dy.dtype))

    return _with_gradient(tf.convert_to_tensor(tensor), over_share)


def _with_gradient(tensor: tf.Tensor, gradient: Callable) -> tf.Tensor:
    """The tensor; what flows back through it is `gradient` of what arrives."""
    if not tensor.dtype.is_floating:
        return tensor
    return custom_gradient(lambda x: (tf.identity(x), gradient))(tensor)
