"""Pipelines of KerasHub's language models generate what one process does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.pipeline import generating
from tests.tensor_parallel.families import DECODERS

pytest.importorskip("keras_hub")

PIPELINE = {"mesh": {"pipeline": 2}}


def check(pool, one_process, name: str, options: dict, **pipeline) -> None:
    (right,) = one_process.run(generating.generated, name, timeout=240)
    for found in pool.run(generating.generated, name, options, timeout=300, **pipeline):
        for sampler, tokens in right.items():
            np.testing.assert_array_equal(found[sampler], tokens, err_msg=sampler)
    assert len({tokens.tobytes() for tokens in right.values()}) > 2


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("name", slow_but(["GPT2"], DECODERS))
def test_each_family(pool, one_process, name):
    check(pool, one_process, name, PIPELINE)
