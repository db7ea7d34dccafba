"""A layout of the planner's benchmark on the ranks of a job; the chief prints a line of JSON.

`python -m tests.hosts.planning` runs it between hosts: `tfdist-run ... -- python -m
benchmarks.planning_rank CASE`, where CASE is JSON as `Case.as_json` makes it, or "links" for the times of
all-reduces, and of a step of `LINK_CASE`, whose gradients are hidden or not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.planning_cases import LINK_CASE, Case

#: Bytes of the all-reduces.
SIZES = [4096, 1 << 20, 1 << 22, 1 << 24]
_STEPS = 6


def main() -> None:
    """The program."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)

    from tfdist import strategies
    from tfdist.addons.planner import Layout
    from tfdist.collectives.objects import all_gather_object
    from tfdist.launch.plan import trials

    wanted = json.loads(sys.argv[1])
    if wanted == "links":
        strategy = strategies.auto(watchdog_seconds=0)
        engine = strategy.engine
        found: dict[str, Any] = {
            "messages": all_gather_object(
                trials.all_reduce_seconds(engine.group(), SIZES, 6), engine.group(), name="messages"
            )
        }
        # The step, and what each rank computes of it, by itself.
        case = LINK_CASE
        for name, chosen, layout, rows in (
            ("step", strategy, case.layout, case.batch),
            ("alone", strategies.LocalStrategy(), Layout(), case.batch // case.layout.ranks),
        ):
            own = trials.train(chosen, case.sizes, layout, rows, _STEPS)
            found[name] = max(all_gather_object(own.seconds, engine.group(), name=name))
    else:
        case = Case.from_json(wanted)
        strategy = strategies.auto(
            case.layout.mesh, zero_stage=case.layout.zero_stage, watchdog_seconds=0
        )
        own = trials.train(strategy, case.sizes, case.layout, case.batch, _STEPS)
        both = (own.seconds, own.before + own.peak)
        every = all_gather_object(both, strategy.engine.group(), name="measured")
        found = {
            "case": wanted,
            "seconds": max(each[0] for each in every),
            "bytes": max(each[1] for each in every),
        }
    if strategy.is_chief:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
