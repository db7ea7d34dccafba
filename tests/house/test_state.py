"""No figure of the house gets worse than the last that was recorded."""

from __future__ import annotations

import json

import pytest

from tests.house.state import FIGURES, RECORD, Figure


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(figure, id=figure.name, marks=[pytest.mark.slow] if figure.on_ranks else [])
        for figure in FIGURES
    ],
)
def test_no_figure_gets_worse(figure: Figure):
    recorded = json.loads(RECORD.read_text())[figure.name]
    found = figure.count()
    is_worse = found < recorded if figure.more_is_better else found > recorded
    assert not is_worse, (
        f"{figure.name}: {found}, recorded {recorded}. `python -m tests.house.state` prints all."
    )
