"""Broken presets are refused in one line, alone and on ranks."""

from __future__ import annotations

import pytest

from tests.addons.hub import hostile, programs
from tests.conftest import on_ranks

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}


ZERO = {"zero_stage": 3}
QUICK = ["a missing part", "a configuration that is no JSON", "a model with more layers"]


def check(found: dict[str, str], names) -> None:
    assert list(found) == list(names)
    for name, message in found.items():
        for part in hostile.BROKEN[name][2]:
            assert part in message, f"{name}: {message}"
        assert "\n" not in message and len(message) < 800, f"{name}: {message}"


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param(TENSOR, QUICK, id="some"),
        pytest.param(TENSOR, list(hostile.BROKEN), marks=pytest.mark.slow, id="tensor"),
        pytest.param(ZERO, list(hostile.BROKEN), marks=pytest.mark.slow, id="zero"),
    ],
)
def test_broken_presets_are_refused_in_one_line(pool, one_process, tmp_path, options, names):
    for parts in (False, True):
        whole = str(tmp_path / f"whole-{parts}")
        one_process.run(programs.make_preset, "Llama", whole, "float32", parts, timeout=120)
    folders = {}
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        hostile.break_preset(str(tmp_path / f"whole-{hostile.BROKEN[name][0]}"), folder, name)
        folders[name] = str(folder)
    check(one_process.run(hostile.refused, folders, None, timeout=240)[0], names)
    for found in pool.run(hostile.refused, folders, options, timeout=240):
        check(found, names)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_a_model_without_values_generates_nothing(pool, one_process, tmp_path):
    folder = str(tmp_path / "preset")
    one_process.run(programs.make_preset, "Llama", folder, "float32", timeout=120)
    for message in pool.run(hostile.generate_without_values, folder, timeout=120):
        assert "pipeline axis" in message and "PipelineModel" in message, message
        assert "\n" not in message
