"""The prefill of generation: a prompt's keys and values, without the logits of its tokens.

A causal model of KerasHub fills its cache by a call whose logits it drops. In one process TensorFlow
then does not compute them. On ranks they would be computed and joined: a collective runs even if
its result is not used.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.tensor_parallel.adapters import override

#: The method of KerasHub's causal models that fills the cache; each drops the logits.
_FILLS_CACHE = "_build_cache"


class _Local(threading.local):
    drops = False


_local = _Local()


def drops_logits() -> bool:
    """Whether the logits that are computed now are dropped."""
    return _local.drops


def dropped_logits(logits, vocabulary_size: int):
    """A placeholder for joined logits that are dropped, filled with NaN.

    Args:
        logits: This rank's logits, of shape [..., any].
        vocabulary_size: The last dim of joined logits.
    """
    shape = tf.concat([tf.shape(logits)[:-1], [vocabulary_size]], axis=0)
    nothing = tf.fill(shape, tf.constant(float("nan"), logits.dtype))
    return tf.ensure_shape(nothing, [*logits.shape[:-1], vocabulary_size])


def drop_logits_of_prefill(model: keras.Model) -> None:
    """Makes a split model of KerasHub fill its cache without joined logits; others do not change."""
    stock = getattr(type(model), _FILLS_CACHE, None)
    if callable(stock):
        # A method, so that it is bound to a copy of the model, too.
        override(model, _FILLS_CACHE, types.MethodType(_without_logits(stock), model))


def _without_logits(stock: Callable) -> Callable:
    def fill_cache(self, *args, **kwargs):
        with _dropping():
            return stock(self, *args, **kwargs)

    return fill_cache


@contextlib.contextmanager
def _dropping() -> Iterator[None]:
    before, _local.drops = _local.drops, True
    try:
        yield
    finally:
        _local.drops = before
