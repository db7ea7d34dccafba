"""ZeRO: step time of each stage over stage 0, and the bytes that a rank holds.

    python -m benchmarks.zero [--engine=horovod|tensorflow] [--rounds=15] [--table=docs/memory.md]

Times are of the wide GPT on 2 ranks with 1 thread each; the stages take turns on the same ranks, and
a ratio is that of one turn. Bytes are those of live variables between steps plus the peak of a step,
on 1, 2 and 4 ranks, beside the formula; the model's activations are next to nothing.
"""

from __future__ import annotations

import sys

from tabulate import tabulate

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    parser,
    variants_in_turn,
    wide_gpt,
    write_between,
    write_json,
)
from tfdist.gradients.throttle import MAX_IN_FLIGHT, MAX_IN_FLIGHT_SHARDED
from tfdist.testing import RankPool

LIMITS = {1: 1.05, 2: 1.05, 3: 1.4}
STAGES = (0, 1, 2, 3)
POLICIES = ("float32", "mixed_bfloat16")
_STEPS = 6
#: Width and number of layers of the model whose bytes are counted: 256 MiB of parameters, in layers as
#: small beside them as those of models that need this.
_WIDTH, _LAYERS = 1024, 64
_MIB = 1 << 20


def prepare_gpt(stage: int) -> None:
    """Builds and warms up the wide GPT on this rank."""
    from tfdist.testing import rank

    rank._state["gpt", stage] = wide_gpt(zero_stage=stage)
    step_seconds(stage)


def step_seconds(stage: int) -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    model, data = rank._state["gpt", stage]
    return fit_step_seconds(model, data, _STEPS)


def held_bytes(stage: int, policy: str) -> tuple[float, float, float, float]:
    """MiB on this rank: of parameters, of state, of a step's peak beside them, and the formula's."""
    import keras
    import tensorflow as tf

    from tfdist.addons.monitoring import memory_report
    from tfdist.addons.monitoring.memory import PeakMemory
    from tfdist.testing import engine, strategy

    keras.backend.clear_session()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy(zero_stage=stage, bucket_mib=1).scope():
            layers = [keras.layers.Dense(_WIDTH, use_bias=False) for _ in range(_LAYERS)]
            model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
            # A norm of all gradients: each stands until the last is there.
            model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=1.0), "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    x = tf.random.normal([4, _WIDTH])
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    model.fit(data, steps_per_epoch=2, verbose=0)
    step = model.make_train_function() or model.train_function
    iterator = iter(model.distribute_strategy.experimental_distribute_dataset(data))
    peaks = []
    for _ in range(5):
        with PeakMemory(0.0002) as peak:
            step(iterator)
        peaks.append(peak.bytes)
    report = memory_report(model)
    parameters, state = (
        report.row(name).measured or 0 for name in ("parameters", "optimizer state")
    )
    whole = formula_bytes(stage, engine().size, policy)
    return parameters / _MIB, state / _MIB, min(peaks) / _MIB, whole / _MIB


def formula_bytes(stage: int, ranks: int, policy: str) -> float:
    """That of docs/memory.md: parameters, gradients or 16-bit copies, state; and what is under way."""
    layer = _WIDTH * _WIDTH * 4
    whole = _LAYERS * layer
    # Gradients are reduced to parts as they come, in stage 1 too.
    parameters, gradients, state = (
        size / (ranks if stage >= least else 1)
        for size, least in ((whole, 3), (whole, 1), (2 * whole, 1))
    )
    copies = whole / 2 if policy != "float32" and stage < 3 else 0
    held = parameters + max(gradients, copies) + state
    if ranks == 1:
        return held
    if stage == 0:
        return held + MAX_IN_FLIGHT * layer
    return held + MAX_IN_FLIGHT_SHARDED * layer * (2 if stage == 3 else 1)


def measure_steps(engine: str, rounds: int) -> list[Ratio]:
    """Each stage over stage 0."""
    with RankPool(2, engine, environment=ENVIRONMENT) as ranks:
        seconds = variants_in_turn(ranks, STAGES, prepare_gpt, step_seconds, rounds)
    found = []
    for stage, limit in LIMITS.items():
        found.append(Ratio(f"wide GPT: stage {stage} / stage 0", seconds[stage], seconds[0], limit))
        print(found[-1].row(), flush=True)
    return found


def measure_bytes(engine: str) -> list[dict]:
    """A line for each policy, stage and number of ranks: the rank that holds most."""
    found = []
    print("policy           ranks  stage  parameters    state  in a step      sum  formula   MiB")
    for ranks in (1, 2, 4):
        with RankPool(ranks, "local" if ranks == 1 else engine) as pool:
            for policy in POLICIES:
                for stage in STAGES if ranks > 1 else (0,):
                    parts = max(pool.run(held_bytes, stage, policy, timeout=300), key=sum)
                    *held, formula = parts
                    found.append(
                        {
                            "policy": policy,
                            "ranks": ranks,
                            "stage": stage,
                            "held": sum(held),
                            "formula": formula,
                        }
                    )
                    print(
                        f"{policy:<16} {ranks:>5}  {stage:>5}  {held[0]:>10.1f} {held[1]:>8.1f} "
                        f"{held[2]:>10.1f} {sum(held):>8.1f} {formula:>8.1f}",
                        flush=True,
                    )
    return found


def write_table(path: str, held: list[dict]) -> None:
    """Puts the table of bytes into a document, between the marks that are there for it."""
    rows = [
        (
            line["policy"],
            line["ranks"],
            line["stage"],
            f"{line['held']:,.0f}",
            f"{line['formula']:,.0f}",
            f"{line['held'] / line['formula'] - 1:+.1%}",
        )
        for line in held
    ]
    head = ("policy", "ranks", "`zero_stage`", "measured, MiB", "formula, MiB", "off by")
    table = tabulate(rows, head, tablefmt="github", disable_numparse=True)
    write_between(path, "benchmarks.zero: bytes", table)


def main() -> int:
    """Prints the tables; exit code 1 where a figure is above its limit."""
    flags = parser(__doc__, ["steps", "bytes"])
    flags.add_argument("--table", help="A document for the table of bytes.")
    options = flags.parse_args()
    ratios: list[Ratio] = []
    held: list[dict] = []
    if options.only != "bytes":
        print(HEADER)
        ratios = measure_steps(options.engine, options.rounds)
    if options.only != "steps":
        held = measure_bytes(options.engine)
    write_json(options.json, options.engine, ratios, bytes=held)
    if options.table and held:
        write_table(options.table, held)
    is_over = any(ratio.is_over for ratio in ratios)
    is_over |= any(abs(line["held"] / line["formula"] - 1) > 0.05 for line in held)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
