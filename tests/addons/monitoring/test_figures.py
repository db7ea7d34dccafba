"""The figures of a report by hand, from what two ranks would tell each other."""

from __future__ import annotations

import pytest

from tfdist.addons.monitoring.monitor.block import Block
from tfdist.addons.monitoring.monitor.summary import Totals
from tfdist.mesh import Mesh


def block(**numbers: float) -> Block:
    found = Block()
    for name, value in numbers.items():
        found[name.replace("__", "/")] = value
    return found


@pytest.fixture
def logs() -> dict[str, float]:
    """Ten steps of 0.2 s on two ranks, of which the second works longer."""
    totals = Totals(Mesh(data=2).resolve(2, 0), peak_flops=None, bandwidth=1e9)
    common = {
        "steps": 10,
        "seconds": 2.0,
        "rows": 80,
        "communicating": 0.5,
        "hidden": 0.4,
        "sent": 2e8,
        "total__optimizer": 0.2,
        "memory": 3e6,
        "parameters": 1e6,
    }
    totals.add(
        [
            block(**common, total__forward_backward=1.0, work=0.12, peak_memory=4e6),
            block(**common, total__forward_backward=1.4, work=0.18, peak_memory=5e6),
        ]
    )
    return totals.logs()


def test_bandwidth_use(logs):
    # 2 x 2e8 bytes in 2 x 0.5 s, of a link that carries 1e9 bytes a second.
    assert logs["bytes_per_second"] == pytest.approx(4e8)
    assert logs["bandwidth_use"] == pytest.approx(0.4)


def test_compute_share(logs):
    # 1.0 + 1.4 s of forward and backward passes and 2 x 0.2 s of the optimizer, in 4 s.
    assert logs["compute_share"] == pytest.approx(0.7)


def test_memory_efficiency(logs):
    # Of the rank that holds most: 1e6 bytes of parameters in 5e6.
    assert logs["peak_memory"] == 5e6 and logs["memory_efficiency"] == pytest.approx(0.2)


def test_imbalance(logs):
    # Ranks work for 0.12 and 0.18 s of a step: 0.06 s apart, of 0.15 s on average.
    assert logs["imbalance"] == pytest.approx(0.4)


def test_what_is_hidden_and_the_rate(logs):
    assert logs["communication_hidden"] == pytest.approx(0.8)
    assert logs["samples_per_second"] == pytest.approx(80)  # 160 rows in 2 s.
