"""A step's host never waits for the GPU, but for what is listed here."""

from __future__ import annotations

import pytest

from tests.gpu_like import programs
from tfdist.testing import RankPool

#: By a part of a wait's text: why it stays.
ALLOWED = {
    "token_embedding_1/Reshape_1 -> PlaceholderWithDefault": "ids of a sparse gradient, which go over the host",
    "DynamicStitch gradient_tape/compile_loss": "TensorFlow's gradient of a mean over rows, once for a loss of Keras",
}
LAYOUTS = [
    ({"data": 2}, {}, {}),
    ({"tensor": 2}, {}, {}),
    ({"data": 2, "tensor": 2}, {"sequence_parallel": True}, {}),
    ({"data": 2}, {}, {"zero_stage": 2}),
    ({"data": 2}, {}, {"zero_stage": 3}),
    ({"pipeline": 2}, {}, {}),
    ({"context": 2}, {}, {}),
]


@pytest.fixture(scope="module")
def process():
    with RankPool(1, "local", threads=1) as found:
        yield found


def name_of(layout) -> str:
    axes, model, options = layout
    return "-".join(f"{name}{value}" for name, value in {**axes, **model, **options}.items())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("axes", "model", "options"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_the_path_of_a_step_does_not_wait(process, axes, model, options):
    (found,) = process.run(programs.waits, axes, model, **options, timeout=120)
    assert not unexplained(found)
    assert len(found) <= 8


def unexplained(waits: list[str]) -> list[str]:
    """Those that are not allowed."""
    return [wait for wait in waits if not any(part in wait for part in ALLOWED)]


@pytest.mark.timeout(240)
def test_tables_do_not_wait(process):
    (found,) = process.run(programs.waits_of_tables, timeout=120)
    assert not unexplained(found)


@pytest.mark.timeout(240)
def test_a_layer_of_experts_waits_once_for_their_choices(process):
    (found,) = process.run(programs.waits, {"expert": 2}, {"num_experts": 4}, timeout=120)
    assert len(found) == 2  # Of two layers.
    assert all("TopKV2" in wait for wait in found)
