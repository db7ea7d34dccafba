"""The memory of activations, as the operating system sees it."""

from __future__ import annotations

import pytest

from tests.conftest import needs_addon
from tests.pipeline.memory_programs import peak_of_a_step
from tfdist.testing import RankPool

#: What is freed goes back to the system at once, so that the resident size follows what is held.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

pytestmark = needs_addon("monitoring")


@pytest.fixture(scope="module")
def curves():
    """Peaks in MiB of each of 4 ranks, by schedule and number of micro-batches."""
    pytest.importorskip("horovod")
    found = {}
    with RankPool(4, "horovod", environment=ENVIRONMENT) as pool:
        for schedule in ("gpipe", "1f1b"):
            for microbatches in (4, 8, 16):
                peaks = pool.run(
                    peak_of_a_step, {"pipeline": 4}, schedule, microbatches, timeout=300
                )
                found[schedule, microbatches] = peaks
                told = ", ".join(f"{peak:.0f}" for peak in peaks)
                print(f"{schedule}, {microbatches} micro-batches: {told} MiB")
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gpipe_holds_more_the_more_micro_batches(curves):
    for rank in range(4):
        four, eight, sixteen = (curves["gpipe", count][rank] for count in (4, 8, 16))
        assert 1.5 < eight / four < 2.3
        assert 1.5 < sixteen / eight < 2.3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_1f1b_holds_the_same_for_any_number_of_micro_batches(curves):
    for rank in range(4):
        four, eight, sixteen = (curves["1f1b", count][rank] for count in (4, 8, 16))
        assert eight < 1.25 * four
        assert sixteen < 1.25 * four


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_1f1b_holds_more_the_more_stages_come_after(curves):
    first, second, third, last = curves["1f1b", 16]
    assert first > second > third > last
    # Two of four layers on a stage hold twice as much of a micro-batch, of half as many.
    assert curves["1f1b", 16][0] < 0.5 * curves["gpipe", 16][0]
