"""Bytes that real ranks send in a step, beside those of the planner."""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import on_ranks, slow_but
from tfdist.addons.planner import Layout, Transformer, estimate, machine
from tfdist.addons.planner.programs import code

#: Wide enough for the layers that ZeRO-3 gathers as a whole; a tied table travels more often.
MODEL, BATCH = Transformer(2, 256, 4, 96, 32, learned_positions=False), 16
LAYOUTS = {
    "data": Layout(data=4),
    "zero-3": Layout(data=4, zero_stage=3),
    "pipeline": Layout(data=2, pipeline=2, num_microbatches=2),
    "pipeline, zero-1": Layout(data=2, pipeline=2, num_microbatches=2, zero_stage=1),
    # Whatever the number of micro-batches, a stage's parameters are gathered once.
    "pipeline, zero-3": Layout(data=2, pipeline=2, num_microbatches=4, zero_stage=3),
    "tensor": Layout(data=2, tensor=2),
}


def bytes_of_steps(program: str, length: int, vocabulary: int) -> list[int]:
    """What this rank sends in each of some steps."""
    from unittest import mock

    import keras
    import numpy as np

    import tfdist
    from tfdist import testing
    from tfdist.testing.traffic import traffic

    x = np.random.default_rng(0).integers(0, vocabulary, (4 * BATCH, length))
    names = {"x": x, "y": x}
    with mock.patch.object(tfdist.strategies, "auto", testing.strategy):
        exec(program, names)
    found = [traffic().sent]
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(traffic().sent)
    )
    names["model"].fit(x, x, batch_size=BATCH, verbose=0, callbacks=[count])
    return [after - before for before, after in itertools.pairwise(found[1:])]


@on_ranks(("horovod", 4))
@pytest.mark.parametrize("name", slow_but(["pipeline, zero-3"], LAYOUTS))
def test_a_step_sends_what_was_planned(pool, name):
    layout = LAYOUTS[name]
    planned = estimate(MODEL, machine("a100"), layout, global_batch=BATCH).traffic
    program = code(MODEL, layout, global_batch=BATCH)
    steps = pool.run(bytes_of_steps, program, MODEL.length, MODEL.vocabulary, timeout=200)
    sent = sum(min(each) for each in steps) / len(steps)
    print(name, sent, planned)
    assert sent == pytest.approx(sum(planned.values()), rel=0.1)
