"""How the size of buckets is found."""

from __future__ import annotations

import pytest

from tests.conftest import on_ranks
from tfdist.launch.bench.buckets import bucket_mib_for

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("message", "rate", "expected"),
    [
        (0.0, 1e9, 1),  # Messages for nothing: as small as buckets get.
        (1e-3, 0.35e9, 4),  # 9 ms' worth of bytes are 3.15 MB.
        (2e-3, 0.118e9, 4),  # A link of 1 Gbit/s.
        (5e-3, 2e9, 16),  # No larger than that.
    ],
)
def test_messages_take_a_tenth_of_the_time(message, rate, expected):
    seconds = [message + size / rate for size in (256 * KIB, 4 * MIB)]
    assert bucket_mib_for(*seconds) == expected


def measured(size: int) -> float:
    from tfdist.launch.bench.buckets import seconds_of_a_sum
    from tfdist.testing import engine

    return seconds_of_a_sum(size, engine().group())


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_all_ranks_see_the_slowest_ones_time(pool):
    first, second = pool.run(measured, 4096, timeout=60)
    assert first == second > 0.0
