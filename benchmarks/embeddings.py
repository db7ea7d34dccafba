"""A step of a recommender on 2 ranks against 1 process, by where its tables lie.

    python -m benchmarks.embeddings [--engine=horovod|tensorflow] [--rounds=15] [--only=rows-sgd]

The model is the DLRM of `python -m benchmarks.training`, whose comparisons `dlrm-horovod` and
`dlrm-one-process` are with others. Each rank has 1 thread, the process 2.
"""

from __future__ import annotations

import itertools
import sys

from benchmarks.comparisons import SIZES
from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    parser,
    write_json,
)
from tfdist.testing import RankPool

LIMIT = 1.0
_STEPS = 12
PLACEMENTS, OPTIMIZERS = ("auto", "rows", "columns", "table"), ("sgd", "adagrad")
CASES = tuple(f"{where}-{rule}" for where, rule in itertools.product(PLACEMENTS, OPTIMIZERS))


def prepare(case: str) -> None:
    """Builds and warms up a model on this rank; `step_seconds` then measures it."""
    import keras
    import tensorflow as tf

    from tfdist.addons import recommenders
    from tfdist.testing import rank, strategy

    sizes = SIZES["full"]["dlrm"]
    placement, _, optimizer = case.partition("-")
    vocabularies = [sizes["vocabulary"]] * sizes["tables"]
    inputs, clicks, _ = recommenders.make_clicks(sizes["batch"], sizes["dense"], vocabularies)
    keras.utils.set_random_seed(0)
    with strategy().scope():
        model = recommenders.dlrm(
            sizes["dense"],
            vocabularies,
            embedding_dim=sizes["width"],
            bottom_widths=(sizes["hidden"],),
            top_widths=(2 * sizes["hidden"], sizes["hidden"]),
            placement=placement,
        )
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensors((inputs, clicks)).repeat()
    # One model at a time: the tables are large.
    rank._state["recommender"] = (model, data)
    step_seconds()


def step_seconds() -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    model, data = rank._state["recommender"]
    return fit_step_seconds(model, data, _STEPS)


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, CASES).parse_args()
    print(HEADER)
    found = []
    with (
        RankPool(2, options.engine, environment=ENVIRONMENT) as ranks,
        RankPool(1, "local", threads=2) as single,
    ):
        for case in CASES if options.only is None else (options.only,):
            for pool in (ranks, single):
                pool.run(prepare, case, timeout=300)
            two, one = in_turn((ranks, single), step_seconds, options.rounds)
            found.append(Ratio(f"dlrm, {case}: 2 ranks / 1 process", two, one, LIMIT))
            print(found[-1].row(), flush=True)
    write_json(options.json, options.engine, found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
