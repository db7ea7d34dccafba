"""Hogwild!: threads that update one model without locks."""

from __future__ import annotations

import math

import pytest

from tests.addons.asynchronous import programs


def test_one_thread_is_plain_keras(one_process):
    assert one_process.run(programs.hogwild_is_serial, timeout=100)[0] == 0


@pytest.mark.timeout(200)
def test_a_sparse_logistic_regression_converges_as_in_one_thread(one_process):
    serial, _, updates = one_process.run(programs.hogwild_losses, 1, timeout=90)[0]
    loss, logged, made = one_process.run(programs.hogwild_losses, 3, timeout=90)[0]
    assert made == updates == 3 * 250
    assert loss == pytest.approx(serial, rel=0.01)
    assert math.isfinite(logged)


@pytest.mark.parametrize(
    ("optimizer", "rows", "batch_size", "threads"),
    [("sgd", 96, 32, 2), ("adam", 50, 7, 3), ("sgd", 5, 2, 4)],
)
def test_dense_models_run_and_are_counted(one_process, optimizer, rows, batch_size, threads):
    updates, counted, first, last = one_process.run(
        programs.hogwild_counts, optimizer, rows, batch_size, threads, timeout=100
    )[0]
    assert updates == 10 * -(-rows // batch_size)
    assert counted == rows
    assert math.isfinite(last) and (rows < 50 or last < first)
