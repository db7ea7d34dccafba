"""Damages checkpoints at random and restores: `python -m tests.checkpoint.fuzz --cases=2000 --seed=7 [--s3]`.

Each case begins with good checkpoints of steps 10 and 20, of which the newer is damaged. What follows is
either step 20 bit for bit, or step 10 bit for bit and a warning of one line that names what is damaged,
or a `CheckpointError` of one line and a model that is as it was. Nothing on disk is touched. The seed is
drawn where none is given, and printed; a case is found again by seed and number.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import keras
import numpy as np

from tests.checkpoint.damages_of_descriptions import BOUND, DAMAGES, RECORDED
from tests.checkpoint.stores import BUCKET, S3, s3

__all__ = ["Fuzzer", "run"]

_CASE_SECONDS = 30
_GOLDEN = Path(__file__).parent / "golden" / "v1"


def build() -> keras.Model:
    """Layers of equal shapes with and without names, and several chunks in an array."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(6, name="enc_2"),
            layers.Dense(6, name="enc_1"),
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(40),
        ]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def build_golden() -> keras.Model:
    """The model of the checkpoints of format 1."""
    from tests.checkpoint.golden.models import trained

    return trained("counting", None)


def variables_of(model: keras.Model) -> list:
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    return [*model.variables, *model.optimizer.variables, *metrics]


def values_of(model: keras.Model) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in variables_of(model)]


class Fuzzer:
    """Cases on a pair of checkpoints.

    Args:
        folder: Where they lie, and where each case gets a copy.
        version: The format of the checkpoints.
        server: An object store, in which the damaged copy then is; None for a folder.
    """

    def __init__(self, folder: Path, version: int = 2, server: S3 | None = None):
        from tfdist import checkpoint
        from tfdist.checkpoint import chunks

        self._restore, self._error = checkpoint.restore, checkpoint.CheckpointError
        self._base, self._work, self._server = folder / "base", folder / "work", server
        self._names = sorted(set(DAMAGES) - (BOUND | RECORDED if version == 1 else set()))
        if version == 1:
            shutil.unpack_archive(_GOLDEN / "counting.tar.xz", self._base, filter="data")
            self._model = build_golden()
        else:
            self._model = build()
            written = []
            with mock.patch.object(chunks, "CHUNK_BYTES", 256):
                for step in (10, 20):
                    self._fill(step)
                    written.append(values_of(self._model))
                    checkpoint.save(self._base, self._model, step=step, state={"step": step})
        self._old, self._new = sorted(self._base.glob("step-*"))
        self._right = {}
        for path in (self._old, self._new):
            self._fill(1)
            checkpoint.restore(path, self._model)
            self._right[path.name] = values_of(self._model)
        if version == 2 and list(self._right.values()) != written:
            raise AssertionError("A whole checkpoint is not restored as it was saved.")
        self.counts: collections.Counter = collections.Counter()

    def _fill(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        for variable in variables_of(self._model):
            value = chance.uniform(1, 100, variable.shape)
            variable.assign(value.astype(variable.dtype))

    def case(self, seed: str, name: str | None = None) -> str:
        """Runs one case.

        Returns:
            What was wrong; "" where nothing was.
        """
        chance = random.Random(seed)
        name = name or chance.choice(self._names)
        if self._work.exists():
            _remove(self._work)
        shutil.copytree(self._base, self._work)
        new, old = self._work / self._new.name, self._work / self._old.name
        DAMAGES[name](chance, new, old)
        self._fill(3)
        address: Path | str = self._work
        if self._server is not None:
            self._server.upload(self._work, "work")
            address = f"s3://{BUCKET}/work"
        before, disk = values_of(self._model), self._snapshot()
        said: list[str] = []
        try:
            with _within(_CASE_SECONDS), _heard(said):
                self._restore(address, self._model)
        except self._error as error:
            said = [str(error)]
            outcome = "an error" if values_of(self._model) == before else "partly assigned"
        except BaseException:
            return f"{name}: {traceback.format_exc()}"
        else:
            found = values_of(self._model)
            outcome = next((key for key, right in self._right.items() if right == found), "wrong")
        self.counts[name, outcome] += 1
        lines = [line for line in said if "\n" in line or "\r" in line]
        if lines:
            return f"{name}: not one line: {lines[0]!r}"
        if self._snapshot() != disk:
            return f"{name}: files were touched"
        if outcome in ("an error", self._new.name):
            return ""
        if outcome != self._old.name:
            return f"{name}: {outcome} weights"
        if not any(self._new.name in line for line in said):
            return f"{name}: step 10 without a word on {self._new.name}, but {said}"
        return ""

    def _snapshot(self) -> list:
        return _snapshot(self._work) if self._server is None else self._server.names()


def _snapshot(folder: Path) -> list[tuple]:
    found = []
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        found.append((str(path), state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino))
    return found


def _remove(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def late(number, frame):
        raise TimeoutError(f"It hangs: {seconds} s have passed.")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Collects the warnings of tfdist."""

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, listener = logging.getLogger("tfdist"), Listener(logging.WARNING)
    logger.addHandler(listener)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates


def run(
    cases: int, seed: str, version: int = 2, every: bool = False, in_s3: bool = False
) -> list[str]:
    """Runs cases, and returns what was wrong.

    Args:
        cases: How many.
        seed: Each case draws from a generator of this seed and its number.
        version: The format of the checkpoints.
        every: Whether each kind of damage gets a case before chance decides.
        in_s3: Whether they are in an object store.
    """
    wrong: list[str] = []
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast) as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(s3()) if in_s3 else None
        if server is not None:
            stack.enter_context(mock.patch.dict(os.environ, server.direct))
        fuzzer = Fuzzer(Path(folder), version, server)
        names = fuzzer._names if every else []
        for number in range(cases):
            name = names[number] if number < len(names) else None
            found = fuzzer.case(f"{seed}/{number}", name)
            if found:
                wrong.append(f"case {number} of seed {seed}, format {version}: {found}")
        if fuzzer._work.exists():
            _remove(fuzzer._work)
        for (name, outcome), count in sorted(fuzzer.counts.items()):
            print(f"{count:5d}  {name}: {outcome}")
    return wrong


def main() -> int:
    """Prints what was wrong; exit code 1 where something was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 32)))
    parser.add_argument("--format", type=int, choices=(1, 2), default=2)
    parser.add_argument("--every", action="store_true", help="Each kind of damage first.")
    parser.add_argument("--s3", action="store_true", help="In an object store.")
    options = parser.parse_args()
    print(f"--seed={options.seed}", flush=True)
    begun = time.monotonic()
    wrong = run(options.cases, options.seed, options.format, options.every, options.s3)
    for each in wrong:
        print(each)
    seconds = time.monotonic() - begun
    print(f"{options.cases} cases in {seconds:.0f} s: {len(wrong)} wrong, seed {options.seed}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
