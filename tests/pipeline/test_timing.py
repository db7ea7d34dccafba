"""When each rank did what, as a timed pipeline tells it."""

from __future__ import annotations

import itertools
import json

import keras
import numpy as np
import pytest

from tests.conftest import needs_addon, on_ranks, slow_but
from tfdist.pipeline.simulation import needs


def timed_run(schedule: str, path: str):
    """A step's run on every rank, and the trace that the chief writes."""
    from tests.models.gpt_programs import scope
    from tfdist.addons.monitoring import save_timeline
    from tfdist.pipeline import PipelineModel
    from tfdist.testing import engine

    keras.backend.clear_session()
    layers = [keras.Input((64,)), *[keras.layers.Dense(64) for _ in range(4)]]
    with scope({"pipeline": 2}):
        model = PipelineModel(layers, num_microbatches=4, schedule=schedule, timed=True)
        model.compile("sgd", "mse")
        untimed = PipelineModel(layers, num_microbatches=4)
    with pytest.raises(RuntimeError, match="timed=True"):
        untimed.last_run()
    x = np.zeros((32, 64), "float32")
    model.fit(x, x, batch_size=16, verbose=0)
    run = model.last_run()
    if engine().rank == 0:
        save_timeline(run, path)
    return run


@needs_addon("monitoring")
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "schedule", slow_but(["zero-bubble"], ["1f1b", "interleaved", "zero-bubble"])
)
def test_actions_keep_their_order(pool, tmp_path, schedule):
    first, second = pool.run(timed_run, schedule, str(tmp_path / "trace.json"), timeout=120)
    assert first == second
    times = {
        action: time
        for actions, found in zip(first.schedule.actions, first.times, strict=True)
        for action, time in zip(actions, found, strict=True)
    }
    for found in first.times:
        assert all(begin <= end for begin, end in found)
        assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(found))
    for action, (begin, _) in times.items():
        for needed in needs(action, first.schedule):
            # Its end may come later: a gradient travels while those of weights are computed.
            assert times[needed][0] < begin
    assert 0 <= first.idle_share < 1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(times)
