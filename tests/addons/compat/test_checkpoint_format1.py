"""Names in checkpoints of format 1."""

from __future__ import annotations

from tests.checkpoint.test_shards import Variable
from tfdist.addons.compat.checkpoint_format1 import model_names


def test_names_of_format_1_do_not_count_other_models():
    paths = ["dense_7/kernel", "dense_7/bias", "block_3/dense_8/kernel", "dense_9/kernel", "seed"]
    assert model_names([Variable((1,), path) for path in paths]) == [
        "dense/kernel",
        "dense/bias",
        "block/dense/kernel",
        "dense_1/kernel",
        "seed",
    ]
