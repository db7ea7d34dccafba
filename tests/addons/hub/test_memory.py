"""What ranks need of memory to load a folder of Hugging Face, and the chief to write one."""

from __future__ import annotations

import statistics

import pytest

from tests.addons.hub import memory
from tests.conftest import on_ranks
from tfdist.testing import RankPool

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")

LAYOUTS = {
    "tensor": {"mesh": {"tensor": 2}},
    "zero": {"zero_stage": 3},
    "pipeline": {"mesh": {"pipeline": 2}},
}
#: What Python and TensorFlow need beside arrays.
SLACK = 12 << 20


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_tensor_at_a_time(pool, tmp_path, layout):
    whole = memory.make_folder(str(tmp_path / "folder"))
    shard = 2 * memory.LARGEST
    results = pool.run(
        memory.loaded_and_exported,
        str(tmp_path / "folder"),
        str(tmp_path / "out"),
        LAYOUTS[layout],
        shard,
        timeout=300,
    )
    for rank, (loading, held, exporting) in enumerate(results):
        print(layout, rank, f"{whole:,} {held:,} {loading:,} {exporting:,}")
        assert loading <= held + memory.LARGEST + SLACK
        assert exporting <= memory.LARGEST + shard + SLACK


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["tensor", "zero"])
def test_pairs_need_what_as_many_conversations_do(layout):
    """The median of five runs, each of new processes: the allocator keeps what it had."""
    grown: dict[str, list[int]] = {"conversations": [], "dpo": []}
    for _ in range(5):
        for kind, found in grown.items():
            with RankPool(2, "horovod") as ranks:
                found.append(max(ranks.run(memory.trained, kind, LAYOUTS[layout], timeout=200)))
    print(layout, grown)
    medians = {kind: statistics.median(found) for kind, found in grown.items()}
    assert medians["dpo"] <= 1.15 * medians["conversations"], grown
