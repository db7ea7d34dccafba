"""Variables that the host reads in each step are on the host; those of a model are on the GPU."""

from __future__ import annotations

import pytest

from tests.gpu_like import programs
from tests.gpu_like.stand_in import DEVICE
from tfdist.testing import RankPool


@pytest.mark.timeout(120)
def test_variables_are_where_their_readers_are():
    with RankPool(1, "local", threads=1) as process:
        (found,) = process.run(programs.devices_of_variables, timeout=60)
    on_gpu = {name for name, device in found.items() if DEVICE.strip("/") in device}
    assert on_gpu == {"weight"}
