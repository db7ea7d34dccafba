"""Memory reports on one process: what is planned is what is measured."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from tfdist.addons.monitoring import memory_report
from tfdist.callbacks import MemoryReporter
from tfdist.recompute import recompute
from tfdist.strategies import LocalStrategy

WIDTH, LAYERS, ROWS = 256, 12, 2048
ACTIVATION = 4 * WIDTH * ROWS


def chain(policy: str | None = None):
    keras.backend.clear_session()
    with LocalStrategy().scope():
        stack = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *stack])
        if policy:
            recompute(model, policy)
        model.compile("adam", "mse")
    return model


def test_variables_are_counted():
    model = chain()
    x = np.zeros((8, WIDTH), "float32")
    model.fit(x, x, verbose=0)
    report = memory_report(model)
    elements = LAYERS * (WIDTH * WIDTH + WIDTH)
    parameters, state = report.row("parameters"), report.row("optimizer state")
    assert parameters.whole == parameters.planned == parameters.measured == 4 * elements
    assert abs(state.measured - 2 * 4 * elements) <= 16
    assert "parameters" in report.table() and "MiB" in report.table()
    assert json.loads(report.to_json())["rank"] == 0


@pytest.mark.parametrize(("policy", "least", "most"), [(None, 12, 14), ("sqrt", 6, 10)])
def test_activations_are_planned(policy, least, most):
    planned = memory_report(chain(policy), rows=ROWS).row("activations").planned
    assert least * ACTIVATION <= planned <= most * ACTIVATION


def test_the_peak_of_a_step_is_what_was_planned(tmp_path):
    model = chain()
    reporter = MemoryReporter(str(tmp_path / "{rank}.json"), rows=ROWS, quiet=True)
    x = np.zeros((4 * ROWS, WIDTH), "float32")
    model.fit(x, x, batch_size=ROWS, verbose=0, shuffle=False, callbacks=[reporter])
    rows = {row.what: row for row in reporter.report.rows}
    planned = rows["activations"].planned + rows["gradients"].planned
    # Inputs, targets, and gradients of two activations stand at the same time.
    assert planned * 0.9 < rows["additional peak of a step"].measured < planned + 6 * ACTIVATION
    assert (tmp_path / "0.json").exists()


def test_unknown_shapes_have_no_plan():
    with LocalStrategy().scope():
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    assert all(row.what != "activations" for row in memory_report(model, rows=8).rows)
