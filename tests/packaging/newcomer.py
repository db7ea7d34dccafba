"""A newcomer's path, timed: from an empty folder to two ranks that train a script of the newcomer's own.

    python -m tests.packaging.newcomer dist/tfdist-0.1.0-py3-none-any.whl

Three commands: make an environment, install the wheel, train. What pip has fetched before is in its cache, as an
earlier environment of the user's has left it: `--warm` installs once before, and is not timed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["MOST_SECONDS", "SCRIPT", "walk"]

MOST_SECONDS = 180.0
#: A Keras script of somebody's, with what the README says to change.
SCRIPT = """
import keras
import numpy as np

import tfdist

x = np.random.default_rng(0).random((2000, 20), dtype="float32")
y = (x.sum(axis=1) > 10).astype("int32")

with tfdist.strategies.auto().scope():
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
model.fit(x, y, batch_size=100, epochs=3, verbose=2)
"""


def walk(wheel: Path, folder: Path, python: str = sys.executable) -> list[tuple[str, float]]:
    """Takes the path in an empty folder.

    Args:
        wheel: What is installed.
        folder: Where it happens.
        python: The Python to begin with.

    Returns:
        The commands and the seconds that each took.

    Raises:
        SystemExit: A command failed, or two ranks did not train.
    """
    (folder / "train.py").write_text(SCRIPT)
    commands = [
        f"{python} -m venv env",
        f"env/bin/pip install --quiet {wheel.absolute()}",
        "env/bin/tfdist-run -np 2 -- env/bin/python train.py",
    ]
    # As in a shell of the user's: nothing of this checkout is in sight.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TF_CPP_MIN_LOG_LEVEL", "TFDIST_ANY_VERSION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    took = []
    for command in commands:
        begin = time.monotonic()
        done = subprocess.run(
            command.split(),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=540,
        )
        took.append((command.replace(str(wheel.absolute()), wheel.name), time.monotonic() - begin))
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{command} ended with code {done.returncode}.")
    lines = [line for line in done.stdout.splitlines() if re.search(r"loss: \d", line)]
    if len(lines) != 3:
        raise SystemExit(f"Two ranks are to train three epochs, and said:\n{done.stdout}")
    return took


def main(arguments: list[str] | None = None) -> None:
    """Walks, and prints what took how long.

    Raises:
        SystemExit: It took longer than a newcomer is to wait.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--warm", action="store_true", help="installs once before, untimed")
    options = parser.parse_args(arguments)
    if options.warm:
        _timed(options.wheel)
    # Once more where something else may have kept the machine busy.
    total = _timed(options.wheel)
    if total > MOST_SECONDS:
        total = _timed(options.wheel)
    if total > MOST_SECONDS:
        raise SystemExit(f"A newcomer waits {total:.0f} s, and is to wait {MOST_SECONDS:g} s.")


def _timed(wheel: Path) -> float:
    """Walks in a folder that is gone afterwards, and prints and returns the seconds."""
    with tempfile.TemporaryDirectory(prefix="tfdist-newcomer-") as name:
        took = walk(wheel, Path(name))
    for command, seconds in took:
        print(f"{seconds:6.1f} s  {command}")
    total = sum(seconds for _, seconds in took)
    print(f"{total:6.1f} s  in all, of at most {MOST_SECONDS:g}")
    return total


if __name__ == "__main__":
    main()
