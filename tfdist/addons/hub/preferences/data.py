"""Pairs of a chosen and a rejected answer as batches for `PreferenceLoss`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.addons.hub.chat.packing import packed
from tfdist.addons.hub.chat.rows import Row


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs as arrays; the chosen row of a pair comes first.

    Attributes:
        ids: int32, [pairs, 2, length].
        masks: int32, the same: whether there is a token.
        targets: int32, the same: the next token.
        trained: float32, the same: 1 where the target is one of the answer.
        references: float32, [pairs, 2]: log-probabilities of answers by the reference model.
    """

    ids: np.ndarray
    masks: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    references: np.ndarray

    @classmethod
    def of(cls, pairs: Sequence[tuple[Row, ...]], length: int, *, pad: int = 0) -> Pairs:
        """The arrays of token rows of at most `length` tokens."""
        batch = packed([row for pair in pairs for row in pair], length, pad=pad, pack=False)
        ids, masks, targets, trained = (
            each.reshape(len(pairs), 2, length)
            for each in (
                batch.ids,
                (batch.documents > 0).astype("int32"),
                batch.targets,
                batch.weights,
            )
        )
        return cls(ids, masks, targets, trained, np.zeros([len(pairs), 2], "float32"))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, size: int) -> tf.data.Dataset:
        """Batches of rows for `log_probabilities`, in order; the last is completed by rows of padding."""
        count, length = 2 * len(self), self.ids.shape[-1]
        rest = [(0, -count % size), (0, 0)]
        ids, masks, targets, trained = (
            np.pad(each.reshape(count, length), rest)
            for each in (self.ids, self.masks, self.targets, self.trained)
        )
        masks[count:, 0] = 1
        numbers = np.minimum(np.arange(len(ids)), count)[:, None] + np.zeros([1, length])
        labels = np.stack([targets, trained, numbers], axis=-1).astype("float32")
        inputs = {"token_ids": ids, "padding_mask": masks}
        return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(size)

    def batches(self, size: int, *, ranks: int = 1, seed: int | None = None) -> tf.data.Dataset:
        """Batches for `fit` with `PreferenceLoss`.

        Args:
            size: The pairs of a global batch.
            ranks: The ranks with different rows, none of which may have a half of a pair.
            seed: Of the order, for training on whole batches; None for the given order, with a smaller last
                batch. Pairs without weight make that a multiple of `ranks`.
        """
        count, rest = len(self), -len(self) % ranks if seed is None else 0
        arrays = [
            np.pad(each, [(0, rest), *[(0, 0)] * (each.ndim - 1)])
            for each in (getattr(self, field.name) for field in dataclasses.fields(self))
        ]
        arrays[1][count:, :, 0] = 1  # Attention needs a token.
        # The mean over all pairs, with those of padding, is that over the others.
        weights = np.full(count, (count + rest) / count, "float32")
        arrays.append(np.pad(weights, (0, rest)))
        data = tf.data.Dataset.from_tensor_slices(tuple(arrays))
        if seed is not None:
            data = data.shuffle(count, seed=seed, reshuffle_each_iteration=True)
        return data.batch(size, drop_remainder=seed is not None).map(_labelled).prefetch(2)


def _labelled(ids, masks, targets, trained, references, weights):
    """Inputs and labels of some pairs, with their rows one after the other."""
    length = ids.shape[-1]
    # Each token of a chosen row but the first one, in the mean over those of the batch.
    has_next = tf.pad(tf.cast(masks[..., 1:], tf.float32), [[0, 0], [0, 0], [0, 1]])
    is_pair = tf.cast(weights > 0, tf.float32)
    likelihood = has_next * tf.constant([[[1.0], [0.0]]]) * is_pair[:, None, None]
    pairs = tf.reduce_sum(is_pair)
    likelihood *= pairs / tf.maximum(tf.reduce_sum(likelihood), 1.0)
    references = tf.broadcast_to(references[..., None], tf.shape(ids))
    weights = tf.broadcast_to(weights[:, None, None], tf.shape(ids))
    each = [tf.cast(targets, tf.float32), trained, likelihood, references, weights]
    labels = tf.stack(each, axis=-1)
    inputs = {"token_ids": ids, "padding_mask": masks}
    inputs = {name: tf.reshape(each, [-1, length]) for name, each in inputs.items()}
    return inputs, tf.reshape(labels, [-1, length, labels.shape[-1]])
