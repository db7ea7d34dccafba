"""What generation computes on ranks before the first new token."""

from __future__ import annotations

import numpy as np

from tests.conftest import on_ranks
from tests.tensor_parallel import families

LENGTH = 12


def joined_logits() -> tuple[int, int, bool]:
    """How often logits are joined before the loop of tokens and in it; what the prefill returns is no NaN."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.backend.clear_session()
    with families.scope({"mesh": {"tensor": 2}}):
        model = families.causal_lm("Llama", 2, length=LENGTH)
        tfdist.parallelize(model)
        model.compile(sampler="greedy")
    tokens = tf.ones([2, LENGTH], tf.int32)
    inputs = {"token_ids": tokens, "padding_mask": tf.sequence_mask([3, 3], LENGTH, tf.int32)}
    graph = model.make_generate_function().get_concrete_function(inputs).graph

    def count(operations) -> int:
        return sum("all_gather>" in each.name and ">logits" in each.name for each in operations)

    (loop,) = [each for each in graph.get_operations() if each.type in ("While", "StatelessWhile")]
    body = graph._get_function(loop.get_attr("body").name).graph
    _, cache = model._build_cache(tokens)
    return (
        count(graph.get_operations()),
        count(body.get_operations()),
        bool(np.isfinite(cache).all()),
    )


@on_ranks(("horovod", 2))
def test_logits_of_the_prompt_are_not_joined(pool):
    assert pool.run(joined_logits, timeout=120) == [(0, 1, True)] * 2
