"""Pipelines of KerasHub's language models generate what one process does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.hub import generating
from tests.conftest import on_ranks
from tests.tensor_parallel.families import DECODERS

pytest.importorskip("keras_hub")

PIPELINE = {"mesh": {"pipeline": 2}}
BOTH = {"mesh": {"pipeline": 2, "tensor": 2}}
SHARDED = {"mesh": {"pipeline": 2, "data": 2}, "zero_stage": 3}


@pytest.fixture
def preset(one_process, tmp_path):
    """Makes the preset of a family, and returns its folder."""

    def make(name: str) -> str:
        folder = str(tmp_path / name)
        one_process.run(generating.make_preset, name, folder, timeout=120)
        return folder

    return make


def check(pool, one_process, folder: str, options: dict, few: bool = False, **more) -> None:
    (right,) = one_process.run(generating.generated, folder, few=few, timeout=240)
    for found in pool.run(generating.generated, folder, options, few, timeout=300, **more):
        assert list(found) == list(right)
        for sampler, tokens in right.items():
            np.testing.assert_array_equal(found[sampler], tokens, err_msg=sampler)
    assert few or len({tokens.tobytes() for tokens in right.values()}) > 2


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("name", DECODERS)
def test_each_family(pool, one_process, preset, name):
    check(pool, one_process, preset(name), PIPELINE)


CUTS = [("GPT2", [1, 8]), ("GPT2", [2, 7]), ("GPT2", [8, 1]), ("Gemma", [1, 7])]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_cuts_beside_the_blocks(pool, one_process, preset, name, cut):
    """Ranks with the embedding or the head alone, and cuts inside of what embeds."""
    check(pool, one_process, preset(name), PIPELINE, few=True, cut=cut)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "more", [{"schedule": "interleaved", "chunks": 2}, {"eager": True}], ids=["chunks", "eager"]
)
def test_other_ways(pool, one_process, preset, more):
    check(pool, one_process, preset("Llama"), PIPELINE, few=True, **more)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("options", [BOTH, SHARDED], ids=["tensor", "zero"])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_on_meshes_of_two_axes(pool, one_process, preset, name, options):
    check(pool, one_process, preset(name), options)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_four_stages(pool, one_process, preset):
    check(pool, one_process, preset("Llama"), {"mesh": {"pipeline": 4}})


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_strings(pool, one_process, preset):
    folder = preset("GPT2")
    (right,) = one_process.run(generating.written, folder, None, timeout=240)
    first, second = pool.run(generating.written, folder, PIPELINE, timeout=300)
    assert first == second
    assert first[:-1] == right[:-1]
    assert right[3] != right[4]


REFUSALS = {
    "model": "Generation in a pipeline requires a language model of KerasHub. Received: `functional",
    "program": "and one list of transformer_layers. Received: a RWKV7CausalLM.",
    "reads": "blocks of which its program reads `intermediate_dim`. Received: a Reading.",
}


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(pool, what):
    for said in pool.run(generating.refusal, what, timeout=120):
        assert REFUSALS[what] in said and "tensor axis" in said and "\n" not in said, said
