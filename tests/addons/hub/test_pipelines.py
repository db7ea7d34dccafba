"""Presets as pipelines: read by stages, fine-tuned with adapters, and saved as plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.hub import pipelines, programs
from tests.conftest import on_ranks

pytest.importorskip("keras_hub")

PIPELINE = {"mesh": {"pipeline": 2}}
BOTH = {"mesh": {"pipeline": 2, "tensor": 2}}
SHARDED = {"mesh": {"pipeline": 2, "data": 2}, "zero_stage": 3}


def close(found: dict, right: dict, rounding: float = 1e-5) -> None:
    assert list(found) == list(right)
    for path, value in right.items():
        np.testing.assert_allclose(found[path], value, atol=rounding, err_msg=path)


def adapters(weights: dict) -> dict:
    found = {path: value for path, value in weights.items() if "lora" in path}
    assert found
    return found


def check(pool, one_process, folder, name: str, options: dict, lora: str | None, **more) -> None:
    """Ranks train as one process does; what they save, plain KerasHub reads."""
    preset, ours, plain = (str(folder / each) for each in ("preset", "ours", "plain"))
    one_process.run(pipelines.make_preset, name, preset, timeout=120)
    ((losses, right),) = one_process.run(
        pipelines.tuned, preset, None, plain, lora=lora and "before", timeout=240
    )
    for own, weights in pool.run(
        pipelines.tuned, preset, options, ours, lora=lora, timeout=300, **more
    ):
        assert own[0] == pytest.approx(losses[0], rel=1e-6)
        assert own == pytest.approx(losses, rel=1e-4)
        close(weights, right)
    assert losses[-1] != losses[0]
    # Of layers with adapters Keras saves the sum; their biases are trained, and no adapter has them.
    found, expected = (
        one_process.run(pipelines.read, each, None, timeout=120)[0] for each in (ours, plain)
    )
    close(found, expected)
    if lora:
        (found,) = one_process.run(pipelines.read, preset, f"{ours}.lora.h5", timeout=120)
        close(adapters(found), adapters(right))


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("lora", ["before", "after", None])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma", "Mistral", "Qwen"])
def test_fine_tuning(pool, one_process, tmp_path, name, lora):
    check(pool, one_process, tmp_path, name, PIPELINE, lora)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("lora", ["before", "after"])
@pytest.mark.parametrize("options", [BOTH, SHARDED], ids=["tensor", "zero"])
def test_on_meshes_of_two_axes(pool, one_process, tmp_path, options, lora):
    check(pool, one_process, tmp_path, "Llama", options, lora)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("lora", ["before", "after"])
def test_an_adapter_of_plain_keras_hub_is_read(pool, one_process, tmp_path, lora):
    preset, first, again = (str(tmp_path / each) for each in ("preset", "first", "again"))
    one_process.run(pipelines.make_preset, "Llama", preset, timeout=120)
    one_process.run(pipelines.tuned, preset, None, first, timeout=240)
    adapter = f"{first}.lora.h5"
    ((losses, right),) = one_process.run(
        pipelines.tuned, preset, None, again, loads=adapter, timeout=240
    )
    for own, weights in pool.run(
        pipelines.tuned, preset, PIPELINE, again, lora=lora, loads=adapter, timeout=300
    ):
        assert own == pytest.approx(losses, rel=1e-4)
        close(weights, right)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_never_holds_the_whole(pool, one_process, tmp_path, dtype):
    """Its stage, the largest weight, and a tenth: of 350 million parameters on four stages."""
    folder, options = str(tmp_path / "preset"), {"mesh": {"pipeline": 4}}
    one_process.run(programs.make_large_preset, folder, dtype, timeout=300)
    for grown, held, largest in pool.run(
        pipelines.memory_of_loading, folder, options, dtype, timeout=600
    ):
        assert grown <= 1.1 * (held + largest), (grown, held, largest)
        # Six of 24 layers, and both tables at most: 36% of all.
        assert held < 0.4 * programs.LARGE_PARAMETERS * (4 if dtype == "float32" else 2), held
