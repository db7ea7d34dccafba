"""What generation computes on ranks before the first new token."""

from __future__ import annotations

from unittest import mock

import numpy as np

from tests.conftest import on_ranks
from tests.tensor_parallel import families

LENGTH = 12


def joined_logits() -> tuple[int, int, bool]:
    """How often logits are joined in a graph that generates, and in its prefill; whether its cache is finite."""
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.tensor_parallel import adapters_embedding as module

    keras.backend.clear_session()
    with families.scope({"mesh": {"tensor": 2}}):
        model = families.causal_lm("Llama", 2, length=LENGTH)
        tfdist.parallelize(model)
        model.compile(sampler="greedy")
    tokens = tf.ones([2, LENGTH], tf.int32)
    inputs = {"token_ids": tokens, "padding_mask": tf.sequence_mask([3, 3], LENGTH, tf.int32)}
    stock = module.gather_from_region
    with mock.patch.object(module, "gather_from_region", side_effect=stock) as join:
        model.make_generate_function().get_concrete_function(inputs)
        traced = join.call_count
        _, cache = model._build_cache(tokens)
    return traced, join.call_count - traced, bool(np.isfinite(cache).all())


@on_ranks(("horovod", 2))
def test_logits_of_the_prompt_are_not_joined(pool):
    # Once in the loop of tokens.
    assert pool.run(joined_logits, timeout=120) == [(1, 0, True)] * 2
