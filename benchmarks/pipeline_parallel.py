"""Pipelines of 2 stages: against one process, and how long ranks are idle.

    python -m benchmarks.pipeline_parallel [--engine=horovod|tensorflow] [--rounds=15]

A rank has 1 thread, the process 2; same model, same global batch. The worlds take turns, so that
what else the machine does falls on both; a ratio is that of one turn. Idle shares are read off
the times of the actions of each rank, and stand beside what the schedule's formula says.
"""

from __future__ import annotations

import itertools
import statistics
import sys

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    parser,
    token_batches,
    write_json,
)
from tfdist.testing import RankPool

STEP_LIMIT, IDLE_LIMIT = 1.15, 0.10
MICROBATCHES = (2, 4, 8, 16)
_STEPS = 6


def prepare_gpt(schedule: str | None) -> None:
    """Builds and warms up a GPT on this rank, of one stage or of two."""
    import keras

    from tfdist import Mesh, layers, models
    from tfdist.pipeline import PipelineModel, deferred_weights
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    with strategy(Mesh(data=1, pipeline=-1)).scope():
        if schedule is None:
            model = models.gpt(512, num_layers=4, width=256, num_heads=4, max_length=128)
        else:
            with deferred_weights():
                model = models.gpt(512, num_layers=4, width=256, num_heads=4, max_length=128)
            # Two blocks each; embedding and positions cost next to nothing, the head does not.
            model = PipelineModel(model, num_microbatches=16, schedule=schedule, cut=[5, 4])
        model.compile("adam", layers.VocabParallelCrossEntropy(512))
    rank._state["gpt"] = (model, token_batches(32, 128))
    step_seconds(schedule)


def step_seconds(schedule: str | None) -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    del schedule
    model, data = rank._state["gpt"]
    return fit_step_seconds(model, data, _STEPS)


def prepare_blocks(schedule: str, microbatches: int) -> None:
    """Builds two stages that cost the same: six blocks and nothing else."""
    import keras
    import tensorflow as tf

    from tfdist import Mesh, models
    from tfdist.pipeline import PipelineModel
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    blocks = [models.TransformerDecoderBlock(4, 1024, name=f"block{i}") for i in range(6)]
    with strategy(Mesh(data=1, pipeline=-1)).scope():
        model = PipelineModel(
            [keras.Input((128, 256)), *blocks],
            num_microbatches=microbatches,
            schedule=schedule,
            timed=True,
        )
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = tf.random.normal([2 * microbatches, 128, 256])
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    rank._state[schedule, microbatches] = (model, data)
    idle_share(schedule, microbatches)


def idle_share(
    schedule: str,
    microbatches: int,
    steps: int = 3,
    trace: str | None = None,
    picture: str | None = None,
) -> float:
    """The share of a step's time in which ranks wait; the median of some steps."""
    from tfdist.addons.monitoring.timeline import save_picture, write_chrome_trace
    from tfdist.testing import rank

    model, data = rank._state[schedule, microbatches]
    shares = []
    for _ in range(steps):
        model.fit(data, steps_per_epoch=1, verbose=0)
        run = model.last_run()
        shares.append(run.idle_share)
    if model.distribute_strategy.is_chief:
        if trace:
            write_chrome_trace(run, trace)
        if picture:
            save_picture(run, picture, f"{schedule}, {microbatches} micro-batches, as measured")
    return statistics.median(shares)


def measure_steps(engine: str, rounds: int) -> list[Ratio]:
    """2 stages over one process."""
    found = []
    with (
        RankPool(2, engine, environment=ENVIRONMENT) as ranks,
        RankPool(1, "local", threads=2) as single,
    ):
        single.run(prepare_gpt, None, timeout=300)
        for schedule in ("1f1b", "zero-bubble"):
            ranks.run(prepare_gpt, schedule, timeout=300)
            two, one = in_turn([ranks, single], step_seconds, rounds, schedule)
            name = f"{schedule}, 16 micro-batches: 2 stages / 1 process"
            found.append(Ratio(name, two, one, STEP_LIMIT))
            print(found[-1].row(), flush=True)
    return found


def measure_idle_shares(engine: str, *files: str | None) -> dict[str, list[float]]:
    """Idle shares by schedule, for `MICROBATCHES`; writes a trace and a picture of one step."""
    from tfdist.pipeline.schedules import make_schedule
    from tfdist.pipeline.simulation import simulate

    found: dict[str, list[float]] = {}
    with RankPool(2, engine, environment=ENVIRONMENT) as ranks:
        for schedule, microbatches in itertools.product(("1f1b", "zero-bubble"), MICROBATCHES):
            ranks.run(prepare_blocks, schedule, microbatches, timeout=300)
            last = (schedule, microbatches) == ("1f1b", MICROBATCHES[-2])
            wanted = files if last else ()
            share = ranks.run(idle_share, schedule, microbatches, 7, *wanted, timeout=300)[0]
            formula = simulate(make_schedule(schedule, 2, microbatches)).idle_share
            found.setdefault(schedule, []).append(share)
            print(
                f"{schedule}, {microbatches} micro-batches: idle {share:.1%}, by formula "
                f"{formula:.1%}",
                flush=True,
            )
    return found


def main() -> int:
    """Prints the tables; exit code 1 where a figure is above its limit."""
    flags = parser(__doc__, ["steps", "idle"])
    flags.add_argument(
        "--trace", help="A file for the trace of a step of 1f1b with 8 micro-batches."
    )
    flags.add_argument("--picture", help="A file for a picture of that step.")
    options = flags.parse_args()
    ratios: list[Ratio] = []
    shares: dict[str, list[float]] = {}
    if options.only != "idle":
        print(HEADER)
        ratios = measure_steps(options.engine, options.rounds)
    if options.only != "steps":
        shares = measure_idle_shares(options.engine, options.trace, options.picture)
    write_json(options.json, options.engine, ratios, idle=shares)
    is_over = any(ratio.is_over for ratio in ratios)
    for count, share in zip(MICROBATCHES, shares.get("1f1b", ()), strict=False):
        is_over |= abs(share - 1 / (count + 1)) > IDLE_LIMIT
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
