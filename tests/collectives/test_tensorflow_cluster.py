"""What tfdist asks of TensorFlow's cluster beyond its public calls."""

from __future__ import annotations

import inspect

from tests.conftest import on_ranks


def test_tensorflow_has_the_function():
    from tensorflow.python.eager import context

    found = inspect.signature(context.Context.configure_coordination_service).parameters
    wanted = {"service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs"}
    assert wanted <= found.keys()


def silent_seconds() -> float:
    from tensorflow.python.eager import context

    from tfdist.testing import engine

    engine()
    # What the running cluster was made with: MultiWorkerMirroredStrategy has kept it.
    config = context.context().config.experimental.coordination_config
    return config.heartbeat_timeout_in_ms / 1000


@on_ranks(("tensorflow", 2))
def test_a_worker_may_be_silent_for_as_long_as_the_watchdog_says(pool):
    assert pool.run(silent_seconds) == [600.0, 600.0]
