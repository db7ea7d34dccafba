"""Collectives and layouts on GPUs; two ranks share one where there is no second. Skipped without a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.gpu import ranks
from benchmarks.gpu.parts import LAYOUTS
from tfdist.launch.run.num_ranks import count_gpus
from tfdist.runtime.shared_gpus import SHARE_GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="There is no GPU."),
]


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setenv(SHARE_GPUS, "1")


@pytest.fixture(params=["tensorflow", "horovod"])
def engine(request) -> str:
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed.")
    return request.param


@pytest.mark.timeout(900)
def test_collectives_are_right(engine):
    assert ranks.conformance(False, engine)["wrong"] == 0


@pytest.mark.timeout(900)
def test_layouts_equal_one_process(engine):
    found = ranks.parity(False, engine)
    assert set(found) == set(LAYOUTS)
    wrong = {
        name: difference
        for name, difference in found.items()
        if not isinstance(difference, float) or difference > 1e-4
    }
    assert not wrong


@pytest.mark.timeout(300)
def test_a_job_ends_when_a_rank_is_killed():
    assert ranks.killed(False)["seconds_after_the_kill"] < 10
