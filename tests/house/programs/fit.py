"""A data parallel `fit`: the chief prints what it has imported, and the frames of a gradient and of a collective.

python -m tests.house.programs.fit PLAIN|CALLBACKS FOLDER
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import keras
import numpy as np

import tfdist
from tfdist import strategies
from tfdist.utils.lazy import find_addon

_HERE = Path(__file__).resolve()


def main() -> None:
    """The program."""
    with_callbacks = sys.argv[1] == "CALLBACKS"
    strategy = strategies.auto()
    from tfdist.callbacks import Checkpointer

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    stacks = _stacks_of(strategy.engine)
    callbacks: list = [Checkpointer(sys.argv[2])]
    if with_callbacks:
        callbacks += _callbacks_of_addons()
    model.fit(rows, rows[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
    imported = sorted(name for name in sys.modules if name.split(".")[0] == "tfdist")
    gradient = _frames(next(s for s in stacks if any(f.name == "fit" for f in s)))
    stacks.clear()
    tfdist.collectives.all_reduce(np.float32(1.0), strategy.group())
    collective = _frames(stacks[-1])
    if strategy.is_chief:
        found = {"imported": imported, "gradient": gradient, "collective": collective}
        print(json.dumps(found), flush=True)


def _callbacks_of_addons() -> list:
    """Those that add to a step, where their add-on is installed."""
    if find_addon("monitoring") is None:
        return []
    from tfdist.callbacks import Monitor, TerminateOnNonFinite

    return [Monitor(), TerminateOnNonFinite()]


def _stacks_of(engine) -> list:
    """What is added to with each all-reduce of a gradient or of a user."""
    kind, stacks = type(engine), []
    original = kind.all_reduce

    def all_reduce(self, tensor, group, reduction, name):
        if "gradients" in name or name.endswith("all_reduce/world"):
            stacks.append(traceback.extract_stack())
        return original(self, tensor, group, reduction, name)

    kind.all_reduce = all_reduce
    return stacks


def _frames(stack) -> list[str]:
    """The frames of tfdist in a stack, from the caller inwards."""
    return [
        f"{Path(frame.filename).resolve().relative_to(_HERE.parents[3])}:{frame.lineno} {frame.name}"
        for frame in stack
        if Path(frame.filename).resolve() != _HERE and _is_ours(frame.filename)
    ]


def _is_ours(filename: str) -> bool:
    path = Path(filename).resolve()
    root = _HERE.parents[3]
    return path.is_relative_to(root) and path.relative_to(root).parts[0] in (
        "tfdist",
        "strategies",
        "launch",
        "models",
    )


if __name__ == "__main__":
    main()
